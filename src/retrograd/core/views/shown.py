"""The visible part of a run: the phase, the sites, and the places to which they belong.

A run records sites; a person looks at places. ``fc:weight``, ``fc:weight.grad`` and
``fc:weight.update`` are three sites of one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from retrograd.core.history.history import History
from retrograd.core.history.matrix import check_name
from retrograd.core.history.sink import PHASES, Phase
from retrograd.core.history.ungraded import list_ungraded
from retrograd.core.recording.schedule import describe_schedule
from retrograd.core.sites.site import WATCH, Quantity, Site, parse_leniently, read_accumulated, says_call


def choose_sites(history: History, patterns: Iterable[str] | None) -> list[str]:
    """Sites that the patterns select, in call order; all sites for None.

    Raises:
        NoSuchSiteError: for a pattern that matches nothing.
    """
    return history.sites if patterns is None else history.select(list(patterns))


def check_choice(history: History, patterns: Iterable[str] | None, statistic: str) -> None:
    """Check that there is something to show, before anything is printed.

    Raises:
        NoSuchSiteError: for a pattern that matches nothing.
        StatisticError: for a statistic that was not recorded.
    """
    choose_sites(history, patterns)
    check_name(statistic, history.rows.custom)


def find_phase(history: History) -> Phase:
    """The first phase that has rows: ``train`` if there was training."""
    found = history.outline.steps
    return next((phase for code, phase in enumerate(PHASES) if code in found), PHASES[0])


LOSS_ALONE = (
    "No tensor was recorded, only scalars: no module was called, and no torch optimizer made an update. "
    'To record a tensor, call rg.watch("name", tensor) where it is made.'
)
"""What is said of a run of plain tensors."""

Kind = Literal["activation", "parameter"]
Shown = Quantity | Literal["accumulated"]

_MODULE_SLOTS = frozenset({"output", "input"})


@dataclass(slots=True)
class ModelPlace:
    """One place of the model.

    Attributes:
        name: printed site of the value, whether or not the value itself was recorded.
        path: module path; ``watch/NAME`` for a tensor watched by hand.
        label: its name within the module: slot, keys and call.
        kind: whether it is a parameter.
        sites: the recorded sites, by quantity.
        without: why there is no site of a quantity that would be expected, by quantity.
    """

    name: str
    path: str
    label: str
    kind: Kind
    sites: dict[Shown, str] = field(default_factory=dict)
    without: dict[Shown, str] = field(default_factory=dict)


def group_places(sites: Iterable[str]) -> list[ModelPlace]:
    """Places of the given sites, in the order in which their first site was seen.

    A name that is not a site (from a foreign run) becomes a place of its own.
    """
    places: dict[str, ModelPlace] = {}
    for text in sites:
        site = parse_leniently(text)
        quantity: Shown = site.quantity
        if parameter := read_accumulated(site):
            site, quantity = parameter, "accumulated"
        name, label = (site.value.numbered, site.numbered_label) if says_call(text) else (str(site.value), site.label)
        place = places.get(name)
        if place is None:
            place = places[name] = ModelPlace(name, site.path, label, _kind(site))
        place.sites[quantity] = text
    return list(places.values())


def describe_ungraded(history: History, reasons: Mapping[str, str], *, is_running: bool) -> dict[str, str]:
    """For the name of each parameter that never got a gradient a few words, with the reason where there is one."""
    words = "no gradient so far" if is_running else "never got a gradient"
    if describe_schedule(history.manifest) not in ("", "every step"):
        words = "no gradient at a recorded step"
    return {name: f"{words}: {reasons[name]}" if name in reasons else words for name in list_ungraded(history)}


def add_ungraded(
    places: Sequence[ModelPlace], reasons: Mapping[str, str], manifest: Mapping[str, Any]
) -> list[ModelPlace]:
    """Places together with those of parameters that never got a gradient, each behind its neighbours in the model.

    Args:
        places: those of recorded sites.
        reasons: for the name of each such parameter the words that describe it.
        manifest: that of the run, whose ``model`` lists modules in their order.
    """
    if not any(place.kind == "parameter" and "grad" in place.sites for place in places):
        return list(places)
    added, known = list(places), {place.name: place for place in places}
    paths = [str(each["path"]) for each in manifest.get("model") or () if isinstance(each, Mapping) and "path" in each]
    order = {path: number for number, path in enumerate(paths)}
    for name, text in reasons.items():
        place = known.get(name)
        if place is None:
            site = parse_leniently(name)
            place = known[name] = ModelPlace(name, site.path, site.label, "parameter")
            added.insert(_find_position(added, order, site.path), place)
        place.without["grad"] = text
    return added


def _find_position(places: Sequence[ModelPlace], order: Mapping[str, int], path: str) -> int:
    """Behind the last parameter of this module, or of the nearest one before it in the model, else before the first."""
    own = order.get(path, len(order))
    ranks = [order.get(place.path, -1) if place.kind == "parameter" else len(order) for place in places]
    before = max((rank for rank in ranks if -1 < rank <= own and rank < len(order)), default=None)
    if before is not None:
        return len(ranks) - ranks[::-1].index(before)
    return next((number for number, rank in enumerate(ranks) if own < rank < len(order)), len(places))


def _kind(site: Site) -> Kind:
    watched = site.path.startswith(WATCH) or not site.keys
    return "activation" if watched or site.slot in _MODULE_SLOTS else "parameter"
