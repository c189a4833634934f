"""Writes a report: a history in, one HTML file out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrograd.errors import RunWriteError
from retrograd.history.history import History
from retrograd.history.sink import Event, Phase
from retrograd.runs.reader import Run
from retrograd.views.downsample import Columns, IntArray, share_columns
from retrograd.views.history_of import find_phase, history_of
from retrograd.views.places import Place, group_places
from retrograd.views.report.blocks import Block, make_loss_block, make_statistic_blocks
from retrograd.views.report.exponents import make_exponent_block
from retrograd.views.report.header import make_header, make_status, print_command
from retrograd.views.report.measures import Detail, choose_detail
from retrograd.views.report.nonfinite import find_first_nonfinite
from retrograd.views.report.packing import significant_digits
from retrograd.views.report.page import build_page
from retrograd.views.report.recorded import describe_recorded, list_troubles
from retrograd.views.report.structure import list_modules

FILE_NAME = "report.html"

_SHARE_OF_BLOCKS = 0.85  # of the file; the rest is code, facts and histograms


def write_report(
    run: Run | History,
    path: str | os.PathLike[str] | None = None,
    *,
    phase: Phase | None = None,
    columns: int = 1000,
    megabytes: float = 8.0,
) -> Path:
    """Write one HTML file that shows a run, opens offline and can be mailed.

    Args:
        run: a run folder as opened by ``open_run``, or a history in memory.
        path: the file; ``report.html`` in the run folder, or here for a history, when left out.
        phase: which kind of forward to show; the first of ``train``, ``forward``, ``eval`` … that was recorded,
            when left out.
        columns: the most columns in which steps are drawn. A column keeps the extremes of its steps.
        megabytes: about how large the file may get; digits, then columns are given up for it.

    Returns:
        The path of the file.

    Raises:
        RunWriteError: if the file cannot be written.
    """
    history = history_of(run)
    phase = find_phase(history) if phase is None else phase
    counts = history.matrix("count", phase=phase)
    steps = counts.steps
    detail = choose_detail(len(history.sites), len(steps), columns, megabytes * 1e6 * _SHARE_OF_BLOCKS)
    shared = share_columns(steps, detail.columns)
    blocks = _make_blocks(history, shared, phase, detail)
    events, places = history.events, group_places(history.sites)
    facts = {
        **_describe_run(run, history, events, steps),
        **_describe_data(history, places, shared, blocks, detail),
        "elements": np.fmax.reduce(counts.values, axis=1, initial=0).astype(int).tolist(),
        "nonfinite": find_first_nonfinite(history, places, phase),
        "recorded": describe_recorded(history.manifest, places, phase, significant_digits(detail.mantissa_bits)),
        "troubles": list_troubles(history.manifest, events, run.ranks if isinstance(run, Run) else ()),
        "model": list_modules(history.manifest.get("model")),
    }
    target = _choose_path(run, path)
    _write(target, build_page(facts["title"], facts, blocks))
    return target


def _make_blocks(history: History, columns: Columns, phase: Phase, detail: Detail) -> list[Block]:
    loss = history.loss
    optional = [
        make_loss_block(loss.steps, loss.values, columns),
        make_exponent_block(history, history.sites, columns, phase),
    ]
    statistics = make_statistic_blocks(history, history.sites, columns, phase, detail.mantissa_bits)
    return [*statistics, *(block for block in optional if block is not None)]


def _describe_run(run: Run | History, history: History, events: Sequence[Event], steps: IntArray) -> dict[str, Any]:
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


def _describe_data(
    history: History, places: Sequence[Place], columns: Columns, blocks: Sequence[Block], detail: Detail
) -> dict[str, Any]:
    numbers = {site: number for number, site in enumerate(history.sites)}
    digits = significant_digits(detail.mantissa_bits)
    return {
        "sites": history.sites,
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
        "measures": {block.name: block.facts for block in blocks if block.name != "exponents"},
        "exponents": next((block.facts for block in blocks if block.name == "exponents"), None),
    }


def _choose_path(run: Run | History, path: str | os.PathLike[str] | None) -> Path:
    if path is not None:
        return Path(path)
    return run.path / FILE_NAME if isinstance(run, Run) else Path(FILE_NAME)


def _print_steps(steps: IntArray) -> str:
    if len(steps) == 0:
        return "none"
    return f"{len(steps):,} ({steps[0]:,} to {steps[-1]:,})"


def _write(target: Path, text: str) -> None:
    try:
        target.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise RunWriteError(
            f"The report cannot be written to {str(target)!r}: {error.strerror or error}.",
            repair="give a file in a folder that exists and can be written.",
        ) from error
