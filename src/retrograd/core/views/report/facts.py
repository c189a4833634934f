"""Facts of a page besides its numbers: the run, its model, its sites and places, what was recorded and what was not."""

from __future__ import annotations

import datetime as dt
import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from retrograd.core.amounts import count_of, show_duration
from retrograd.core.history.facts import Gap, read_facts
from retrograd.core.history.history import History
from retrograd.core.history.sink import Event
from retrograd.core.recording.schedule import describe_schedule
from retrograd.core.runs.chosen_ranks import tell_chosen
from retrograd.core.runs.damage import DamagedPart
from retrograd.core.runs.reader import Rank, Run
from retrograd.core.runs.settings import read_settings
from retrograd.core.sites.site import ROOT, Site
from retrograd.core.views.downsample import IntArray
from retrograd.core.views.page.frame import MANTISSA_BITS, significant_digits
from retrograd.core.views.report.blocks import Blocks
from retrograd.core.views.report.scope import Scope
from retrograd.core.views.shown import LOSS_ALONE, ModelPlace


def describe_run(run: Run | History, scope: Scope) -> dict[str, Any]:
    """Title, header, status and command."""
    times = list(scope.history.all_events.times or ())
    counts = {
        "steps": _print_steps(scope.history.made_steps if scope.phase == "train" else scope.columns.steps),
        "sites": f"{len(scope.history.sites):,}",
    }
    if isinstance(run, Run):
        counts["ranks"] = f"{sum(not rank.is_extra for rank in run.ranks):,}"
        times += [rank.facts[moment] for rank in run.ranks for moment in ("began", "written") if moment in rank.facts]
    manifest = scope.history.manifest
    return {
        "title": name_run(run),
        "header": make_header(manifest, max(times) - min(times) if times else None, counts),
        "status": make_status(run.status if isinstance(run, Run) else manifest.get("status")),
        "command": print_command(manifest),
    }


def describe_data(scope: Scope, places: Sequence[ModelPlace], blocks: Blocks) -> dict[str, Any]:
    """Sites, places, columns, and what the blocks hold. Series are named by the number of their site."""
    numbers = {site: number for number, site in enumerate(scope.sites)}
    shapes = find_shapes(scope.history.manifest)
    return {
        "sites": scope.sites,
        "elements": scope.elements,
        "places": [
            {
                "name": place.name,
                "path": place.path,
                "label": place.label,
                "kind": place.kind,
                "without": place.without,
                "shape": shapes.get(place.name),
                "series": {quantity: numbers[site] for quantity, site in place.sites.items()},
            }
            for place in places
        ],
        "columns": {
            "first": scope.columns.first.tolist(),
            "last": scope.columns.last.tolist(),
            "width": scope.columns.width,
            "total": len(scope.columns.steps),
        },
        "digits": significant_digits(scope.mantissa_bits) if scope.mantissa_bits < MANTISSA_BITS else None,
        "measures": [block.facts for block in blocks.statistics],
        "scalars": blocks.scalars and blocks.scalars.facts,
        "hint": LOSS_ALONE,
        "exponents": blocks.exponents and blocks.exponents.facts,
    }


def name_run(run: Run | History) -> str:
    """The run's folder, or words for a history without one."""
    return run.path.resolve().name if isinstance(run, Run) else "history in memory"


def _print_steps(steps: IntArray) -> str:
    if len(steps) == 0:
        return "none"
    return f"{len(steps):,} ({steps[0]:,} to {steps[-1]:,})"


_STATUS_KINDS = {"finished": "good", "running": "warn", "stopped": "warn", "failed": "bad"}


def make_header(
    manifest: Mapping[str, Any], duration: float | None, counts: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Terms and their texts, for what the manifest holds.

    Args:
        manifest: the run's.
        duration: seconds from its beginning to what was written last.
        counts: further terms that are counted from the data.
    """
    versions = manifest.get("versions") or {}
    terms = [
        ("started", _print_time(manifest.get("started"))),
        ("duration", None if duration is None else show_duration(duration)),
        *counts.items(),
        ("optimizer", print_optimizer(manifest)),
        ("batch size", read_settings(manifest).get("batch")),
        ("torch", versions.get("torch")),
        ("python", versions.get("python")),
        ("retrograd", versions.get("retrograd")),
        ("git commit", _print_commit(manifest.get("git"))),
        ("seed", manifest.get("seed")),
        ("host", manifest.get("host")),
    ]
    return [(term, str(text)) for term, text in terms if text not in (None, "")]


def make_status(status: str | None) -> dict[str, str] | None:
    """How the run ended, and in which colour that is shown."""
    return {"text": status, "kind": _STATUS_KINDS.get(status, "warn")} if status else None


def print_command(manifest: Mapping[str, Any]) -> str:
    """The command line as it can be typed."""
    command = manifest.get("command") or ""
    return command if isinstance(command, str) else shlex.join(map(str, command))


def print_optimizer(manifest: Mapping[str, Any]) -> str:
    """Class and arguments of each optimizer, those that are alike once; empty where they are not known."""
    listed = manifest.get("optimizers")
    told = Counter(map(_print_alone, listed if isinstance(listed, list) else []))
    return "; ".join(text if count == 1 else f"{count} × {text}" for text, count in told.items() if text)


def _print_alone(optimizer: Any) -> str:
    settings = read_settings({"optimizers": [optimizer]})
    name = settings.pop("optimizer", "")
    settings = {name: value for name, value in settings.items() if value is not False and name != "initial_lr"}
    told = (
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}" for name, value in settings.items()
    )
    return ", ".join([str(name), *told])


def _print_time(text: str | None) -> str | None:
    try:
        return dt.datetime.fromisoformat(text or "").strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return text


def _print_commit(git: Any) -> str | None:
    if not isinstance(git, Mapping):
        return str(git)[:12] if git else None
    changed = " with changes" if git.get("dirty") else ""
    return f"{str(git.get('commit', ''))[:12]}{changed}"


def list_modules(model: Any) -> list[tuple[int, str, str, int, str, str]]:
    """Depth, name, type, parameters (those of the modules inside included), arguments and shapes of each module.

    Args:
        model: the manifest's ``model``: mappings with ``path``, ``type`` and ``parameters``, a module's own.
    """
    entries = _list_entries(model)
    paths = [str(entry["path"]) for entry in entries]
    totals = _add_up(paths, [_count(entry.get("parameters")) for entry in entries])
    return [
        (
            _depth(path, paths),
            path,
            str(entry.get("type", "")),
            totals[path],
            str(entry.get("settings") or ""),
            ", ".join(f"{name} {shape}" for name, shape in _read_shapes(entry)),
        )
        for path, entry in zip(paths, entries, strict=True)
    ]


def _list_entries(model: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in model or () if isinstance(entry, Mapping) and "path" in entry]


def _read_shapes(entry: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and shapes of a module's own parameters; none in runs of versions that did not record them."""
    shapes = entry.get("shapes")
    known = shapes.items() if isinstance(shapes, Mapping) else ()
    return [(str(name), _show_shape(shape)) for name, shape in known if isinstance(shape, list)]


def _show_shape(shape: Sequence[Any]) -> str:
    return " × ".join(map(str, shape)) or "()"


def find_shapes(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Shapes of parameters, as text, by the names of their places."""
    return {
        str(Site(str(entry["path"]), (name,))): shape
        for entry in _list_entries(manifest.get("model"))
        for name, shape in _read_shapes(entry)
    }


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _add_up(paths: Sequence[str], own: Sequence[int]) -> dict[str, int]:
    totals = dict.fromkeys(paths, 0)
    for path, n in zip(paths, own, strict=True):
        for above in {path, *_ancestors(path)} & totals.keys():
            totals[above] += n
    return totals


def _ancestors(path: str) -> list[str]:
    parts = path.split(".")
    above = [".".join(parts[:n]) for n in range(1, len(parts))]
    return above if path == ROOT else [ROOT, *above]


def _depth(path: str, paths: Sequence[str]) -> int:
    known = set(paths)
    return sum(above in known for above in _ancestors(path))


MOST_LINES = 200
"""Lines of one table that are written; the page says how many more there were."""

_QUANTITIES = {
    ("activation", "value"): ("activation", "activations"),
    ("activation", "grad"): ("gradient of an activation", "gradients of activations"),
    ("parameter", "value"): ("weight", "weights"),
    ("parameter", "grad"): ("gradient of a weight", "gradients of weights"),
    ("parameter", "accumulated"): ("accumulated gradient of a weight", "accumulated gradients of weights"),
    ("parameter", "update"): ("update of a weight", "updates of weights"),
}

_TROUBLES = {
    "dropped": ("Dropped", "Data that were recorded but could not be kept."),
    "overwritten": ("Overwritten in place", "Changed in place before they could be stored; not stored."),
    "rewrite": ("Rewritten", "What rules changed: the rule, and the share of the tensor that it changed."),
    "skipped": ("Skipped updates", "Steps whose update was skipped by loss scaling."),
    "trigger": ("Triggers", "Why tensors were written out."),
    "note": ("Notes", ""),
    "error": ("The end", "The exception that ended the run."),
}


def describe_recorded(scope: Scope, places: Sequence[ModelPlace]) -> list[tuple[str, str]]:
    """Terms and their texts: which sites, which steps, which tensors."""
    counts = Counter(_QUANTITIES[place.kind, quantity] for place in places for quantity in place.sites)
    manifest, digits = scope.history.manifest, significant_digits(scope.mantissa_bits)
    histogram = manifest.get("histogram")
    recorded = histogram.get("recorded") if isinstance(histogram, Mapping) else histogram
    terms = [
        ("sites", ", ".join(count_of(counts[words], *words) for words in _QUANTITIES.values() if counts[words])),
        ("without a gradient", _count_ungraded(places)),
        ("selection", _join(manifest.get("selection"))),
        ("schedule", describe_schedule(manifest)),
        ("ranks", tell_chosen(manifest)),
        ("shown here", f"phase “{scope.phase}”, micro-batches and ranks merged"),
        ("statistics of your own", _join(manifest.get("statistics"))),
        ("histograms of exponents", None if recorded is None else "yes" if recorded else "no"),
        ("tensors kept", _join(manifest.get("tensors")) or "none"),
        ("numbers on this page", "float32" if scope.mantissa_bits == MANTISSA_BITS else f"{digits} significant digits"),
    ]
    return [(term, text) for term, text in terms if text]


def _count_ungraded(places: Sequence[ModelPlace]) -> str:
    count = sum("grad" in place.without for place in places)
    return f"{count_of(count, 'parameter')}, in the map of weight gradients" if count else ""


def list_troubles(
    manifest: Mapping[str, Any],
    events: Iterable[Event],
    ranks: Sequence[Rank] = (),
    unseen: Sequence[str] = (),
    places: Sequence[ModelPlace] = (),
    damaged: Sequence[DamagedPart] = (),
) -> list[dict[str, Any]]:
    """Tables of what went wrong or was left out: ``title``, ``note``, ``columns``, ``rows``, and how many ``more``.

    A parameter that has its row among ``places`` because it never got a gradient is not listed again.
    """
    mapped = {f"{place.name}.grad" for place in places if "grad" in place.without}
    unrecorded = [line for line in _list_unrecorded(manifest.get("not_recorded")) if line[0] not in mapped]
    by_kind: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_kind[event.kind].append(event)
    tables = [
        _tabulate("Not recorded", "", ("site", "why"), unrecorded),
        _tabulate(
            "Without numbers", "Known sites without any numbers on this page.", ("site",), [(name,) for name in unseen]
        ),
        _tabulate(
            "Faults",
            "Internal errors of the recording, caught where they happened; training continued.",
            ("site", "times", "first error"),
            _list_faults(manifest.get("faults"), by_kind["fault"]),
        ),
        _tabulate(
            "Damaged files",
            "Unreadable files; their data are missing from this page.",
            ("file", "where", "why"),
            [("/".join(part.path.parts[-3:]), part.place, part.error.problem) for part in damaged],
        ),
        _tabulate("Lost", "Data that could not be written to the run folder.", ("rank", "what"), _list_lost(ranks)),
        _tabulate(
            "Recorded separately",
            "Processes whose rank was already taken; their data are not on this page.",
            ("rank", "folder"),
            [(str(rank.rank), rank.folder.name) for rank in ranks if rank.is_extra],
        ),
        *(
            _tabulate(title, note, ("step", "what", "why"), [_print_event(event) for event in by_kind[kind]])
            for kind, (title, note) in _TROUBLES.items()
        ),
        _tabulate("Loss scale", "", ("step", "scale"), _list_scales(by_kind["scale"])),
        _tabulate(
            "Recorded within the budget",
            "Of the other steps only scalars are known.",
            ("from step", "recorded steps", "recorded updates", "why"),
            _list_gaps(by_kind["gap"]),
        ),
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


def _list_gaps(events: Sequence[Event]) -> list[tuple[str, ...]]:
    """From which step on how many were recorded, and why."""
    return list(dict.fromkeys(_print_gap(gap) for gap in read_facts(events) if isinstance(gap, Gap)))


def _print_gap(gap: Gap) -> tuple[str, ...]:
    expected = "" if math.isnan(gap.share) else f": {100 * gap.share:.2g} % expected"
    steps, updates = (f"1 of {count:,.0f}" if count > 1 else "all" for count in (gap.value, gap.updates))
    return (f"{gap.step:,}", steps, updates, _WHY_RECORDED.get(gap.reason, gap.reason) + expected)


_WHY_RECORDED = {
    "begin": "the first steps are recorded in full",
    "measure": "to measure what recording costs",
    "cost": "what recording costs",
    "loss": "the loss left its range",
    "nonfinite": "a number was not finite",
    "gradient": "the norm of the gradient left its range",
    "phase": "another optimizer or rate, or a checkpoint was loaded",
}
"""In words, by the reason of a :class:`Gap`."""


def _print_event(event: Event) -> tuple[str, ...]:
    return (f"{event.moment.step:,}", event.name, event.text)


def _join(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else ", ".join(map(str, value))
