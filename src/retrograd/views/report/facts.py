"""What the page must know beside its numbers: the run, its sites and places, its columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrograd.history.history import History
from retrograd.history.sink import Event
from retrograd.runs.reader import Run
from retrograd.views.downsample import Columns, IntArray
from retrograd.views.places import Place
from retrograd.views.report.blocks import Blocks
from retrograd.views.report.header import make_header, make_status, print_command
from retrograd.views.report.measures import Detail
from retrograd.views.report.packing import significant_digits


def describe_run(run: Run | History, history: History, events: Sequence[Event], steps: IntArray) -> dict[str, Any]:
    """Title, header, status and command."""
    times = [event.time for event in events if event.time > 0]
    counts = {"steps": _print_steps(steps), "sites": f"{len(history.sites):,}"}
    if isinstance(run, Run):
        counts["ranks"] = f"{sum(not rank.is_extra for rank in run.ranks):,}"
        times += [rank.facts[moment] for rank in run.ranks for moment in ("began", "written") if moment in rank.facts]
    return {
        "title": run.path.resolve().name if isinstance(run, Run) else "history in memory",
        "header": make_header(history.manifest, max(times) - min(times) if times else None, counts),
        "status": make_status(run.status if isinstance(run, Run) else history.manifest.get("status")),
        "command": print_command(history.manifest),
    }


def describe_data(
    places: Sequence[Place], sites: Sequence[str], columns: Columns, blocks: Blocks, detail: Detail
) -> dict[str, Any]:
    """Sites, places, columns, and what the blocks hold. Series are named by the number of their site."""
    numbers = {site: number for number, site in enumerate(sites)}
    digits = significant_digits(detail.mantissa_bits)
    return {
        "sites": sites,
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
            "first": columns.first.tolist(),
            "last": columns.last.tolist(),
            "width": columns.width,
            "total": len(columns.steps),
        },
        "digits": digits if digits < 7 else None,
        "measures": [block.facts for block in blocks.statistics],
        "loss": blocks.loss and blocks.loss.facts,
        "exponents": blocks.exponents and blocks.exponents.facts,
    }


def _print_steps(steps: IntArray) -> str:
    if len(steps) == 0:
        return "none"
    return f"{len(steps):,} ({steps[0]:,} to {steps[-1]:,})"
