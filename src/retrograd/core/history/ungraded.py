"""Parameters that never got a gradient, as far as a history tells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from retrograd.core.history.facts import Parameter, read_facts
from retrograd.core.history.history import History
from retrograd.core.history.sink import NO_GRADIENT
from retrograd.core.sites.site import LOCAL, parse_leniently


def list_ungraded(history: History) -> list[str]:
    """Names of parameters that train, whose gradient was to be recorded, and that had none in any recorded step.

    Those that are frozen are not among them, nor those of which a gradient came that could not be recorded. Empty where
    no parameter's gradient was recorded at all.
    """
    names = history.site_names
    codes = [code for code, name in enumerate(names) if _is_gradient(name)]
    recorded = set(history.rows.codes)
    seen = {str(parse_leniently(names[code]).value) for code in codes if code in recorded}
    if not seen:
        return []
    missed = dict(_list_missed(history.manifest.get("not_recorded")))
    lacking = {str(parse_leniently(names[code]).value): names[code] for code in codes if code not in recorded}
    found = [
        name
        for name, site in lacking.items()
        if not _is_part(name) and missed.get(site, NO_GRADIENT) == NO_GRADIENT and f"{name}.{LOCAL}" not in seen
    ]
    is_told = all(lacking[name] in missed for name in found)  # as of a recording that has ended
    excluded = frozenset[str]() if is_told else _find_others(history)
    return [name for name in found if name not in excluded]


def _is_gradient(name: str) -> bool:
    site = parse_leniently(name)
    return site.kind == "parameter" and site.quantity == "grad"


def _is_part(name: str) -> bool:
    """True for what one process has of a gradient, or what it was before it was changed."""
    return parse_leniently(name).keys[1:] != ()


def _list_missed(entries: Any) -> Iterator[tuple[str, str]]:
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, Mapping):
            yield str(entry.get("site")), str(entry.get("reason"))


def _find_others(history: History) -> frozenset[str]:
    """Parameters that did not require a gradient when they were looked at last, or that had one at any look."""
    looks = [
        fact
        for fact in read_facts(event for event in history.few_events if event.kind == Parameter.kind)
        if isinstance(fact, Parameter)
    ]
    last = {look.name: look.requires_grad for look in looks}
    had = {look.name for look in looks if look.grad in ("zero", "some")}
    return frozenset(had | {name for name, requires in last.items() if not requires})
