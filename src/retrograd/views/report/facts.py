"""What the page must know beside its numbers: the run, its sites and places, its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retrograd.history.history import History
from retrograd.history.sink import Event
from retrograd.runs.reader import Run
from retrograd.views.downsample import IntArray
from retrograd.views.places import Place
from retrograd.views.report.blocks import Blocks
from retrograd.views.report.header import make_header, make_status, print_command
from retrograd.views.report.packing import MANTISSA_BITS, significant_digits
from retrograd.views.report.scope import Scope


def describe_run(
    run: Run | History, scope: Scope, events: Sequence[Event], further: Mapping[str, str]
) -> dict[str, Any]:
    """Title, header, status and command; ``further`` terms end the header."""
    times = [event.time for event in events if event.time > 0]
    counts = {"steps": _print_steps(scope.columns.steps), "sites": f"{len(scope.history.sites):,}"}
    if isinstance(run, Run):
        counts["ranks"] = f"{sum(not rank.is_extra for rank in run.ranks):,}"
        times += [rank.facts[moment] for rank in run.ranks for moment in ("began", "written") if moment in rank.facts]
    manifest = scope.history.manifest
    return {
        "title": name_run(run),
        "header": [*make_header(manifest, max(times) - min(times) if times else None, counts), *further.items()],
        "status": make_status(run.status if isinstance(run, Run) else manifest.get("status")),
        "command": print_command(manifest),
    }


def describe_data(scope: Scope, places: Sequence[Place], blocks: Blocks) -> dict[str, Any]:
    """Sites, places, columns, and what the blocks hold. Series are named by the number of their site."""
    numbers = {site: number for number, site in enumerate(scope.sites)}
    return {
        "sites": scope.sites,
        "elements": scope.elements,
        "places": [
            {
                "name": place.name,
                "path": place.path,
                "label": place.label,
                "kind": place.kind,
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
        "loss": blocks.loss and blocks.loss.facts,
        "exponents": blocks.exponents and blocks.exponents.facts,
    }


def name_run(run: Run | History) -> str:
    """The run's folder, or words for a history without one."""
    return run.path.resolve().name if isinstance(run, Run) else "history in memory"


def _print_steps(steps: IntArray) -> str:
    if len(steps) == 0:
        return "none"
    return f"{len(steps):,} ({steps[0]:,} to {steps[-1]:,})"
