"""What was recorded, what was not and why: words and tables for the foot of the page."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from retrograd.history.sink import Event
from retrograd.runs.reader import Rank
from retrograd.views.counts import count_of
from retrograd.views.places import Place
from retrograd.views.report.packing import MANTISSA_BITS, significant_digits
from retrograd.views.report.scope import Scope

MOST_LINES = 200
"""Lines of one table that are written; the page says how many more there were."""

_QUANTITIES = {
    ("activation", "value"): ("activation", "activations"),
    ("activation", "grad"): ("gradient of an activation", "gradients of activations"),
    ("parameter", "value"): ("weight", "weights"),
    ("parameter", "grad"): ("gradient of a weight", "gradients of weights"),
    ("parameter", "update"): ("update of a weight", "updates of weights"),
}

_TROUBLES = {
    "dropped": ("Dropped", "Data that were recorded and could not be kept."),
    "overwritten": ("Overwritten in place", "Kept tensors that were changed afterwards; not stored as true."),
    "rewrite": ("Rewritten", "What rules have changed: the rule, and the share of the tensor that it has changed."),
    "skipped": ("Skipped updates", "Steps at which loss scaling left the weights alone."),
    "trigger": ("Triggers", "Why tensors were written out."),
    "note": ("Notes", ""),
    "error": ("The end", "The exception that ended the run."),
}


def describe_recorded(scope: Scope, places: Sequence[Place]) -> list[tuple[str, str]]:
    """Terms and their texts: which sites, which steps, which tensors."""
    counts = Counter(_QUANTITIES[place.kind, quantity] for place in places for quantity in place.sites)
    manifest, digits = scope.history.manifest, significant_digits(scope.mantissa_bits)
    histogram = manifest.get("histogram")
    recorded = histogram.get("recorded") if isinstance(histogram, Mapping) else histogram
    terms = [
        ("sites", ", ".join(count_of(counts[words], *words) for words in _QUANTITIES.values() if counts[words])),
        ("selection", _join(manifest.get("selection"))),
        ("schedule", _join(manifest.get("schedule"))),
        ("shown here", f"phase “{scope.phase}”, micro-batches and ranks merged"),
        ("statistics of your own", _join(manifest.get("statistics"))),
        ("histograms of exponents", None if recorded is None else "yes" if recorded else "no"),
        ("tensors kept", _join(manifest.get("tensors")) or "none"),
        ("numbers on this page", "float32" if scope.mantissa_bits == MANTISSA_BITS else f"{digits} significant digits"),
    ]
    return [(term, text) for term, text in terms if text]


def list_troubles(
    manifest: Mapping[str, Any], events: Iterable[Event], ranks: Sequence[Rank] = (), unseen: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Tables of what went wrong or was left out: ``title``, ``note``, ``columns``, ``rows``, and how many ``more``."""
    by_kind: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_kind[event.kind].append(event)
    tables = [
        _tabulate("Not recorded", "", ("site", "why"), _list_unrecorded(manifest.get("not_recorded"))),
        _tabulate(
            "Without numbers", "Known sites of which this page has nothing.", ("site",), [(name,) for name in unseen]
        ),
        _tabulate(
            "Faults",
            "Errors of the recording itself, caught where they happened; training went on.",
            ("site", "times", "first error"),
            _list_faults(manifest.get("faults"), by_kind["fault"]),
        ),
        _tabulate("Lost", "Data that could not be written to the run folder.", ("rank", "what"), _list_lost(ranks)),
        _tabulate(
            "Recorded by itself",
            "Processes that found their rank taken; what they recorded is not on this page.",
            ("rank", "folder"),
            [(str(rank.rank), rank.folder.name) for rank in ranks if rank.is_extra],
        ),
        *(
            _tabulate(title, note, ("step", "what", "why"), [_print_event(event) for event in by_kind[kind]])
            for kind, (title, note) in _TROUBLES.items()
        ),
        _tabulate("Loss scale", "", ("step", "scale"), _list_scales(by_kind["scale"])),
    ]
    return [table for table in tables if table["rows"]]


def _tabulate(title: str, note: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> dict[str, Any]:
    more = max(0, len(rows) - MOST_LINES)
    return {"title": title, "note": note, "columns": columns, "rows": rows[:MOST_LINES], "more": more}


def _list_unrecorded(entries: Any) -> list[tuple[str, ...]]:
    if isinstance(entries, Mapping):
        return [(str(site), str(why)) for site, why in entries.items()]
    return [
        (str(entry.get("site", "")), str(entry.get("reason", entry.get("why", ""))))
        if isinstance(entry, Mapping)
        else (str(entry), "")
        for entry in entries or ()
    ]


def _list_faults(counts: Any, events: Sequence[Event]) -> list[tuple[str, ...]]:
    """Sites with faults: how often by the manifest, why by the first event."""
    reasons = {event.name: event.text for event in reversed(events)}
    times = dict(counts) if isinstance(counts, Mapping) else {}
    return [(site, str(times.get(site, 1)), reasons.get(site, "")) for site in dict.fromkeys([*times, *reasons])]


def _list_lost(ranks: Sequence[Rank]) -> list[tuple[str, ...]]:
    losses = [(rank, {what: n for what, n in rank.facts.get("lost", {}).items() if n}) for rank in ranks]
    return [(str(rank.rank), ", ".join(f"{n:,} {what}" for what, n in lost.items())) for rank, lost in losses if lost]


def _list_scales(events: Sequence[Event]) -> list[tuple[str, ...]]:
    """The loss scale where it changes."""
    lines: list[tuple[str, ...]] = []
    for event in events:
        scale = f"{event.value:,.6g}"
        if not lines or lines[-1][1] != scale:
            lines.append((f"{event.moment.step:,}", scale))
    return lines


def _print_event(event: Event) -> tuple[str, ...]:
    return (f"{event.moment.step:,}", event.name, event.text)


def _join(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else ", ".join(map(str, value))
