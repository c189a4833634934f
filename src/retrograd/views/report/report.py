"""Writes a report: a history in, one HTML file out."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from retrograd.errors import RunWriteError
from retrograd.history.history import History
from retrograd.history.sink import Phase
from retrograd.runs.reader import Run
from retrograd.views.downsample import share_columns
from retrograd.views.history_of import find_phase, history_of
from retrograd.views.places import group_places
from retrograd.views.report.blocks import Blocks, make_loss_block, make_statistic_blocks
from retrograd.views.report.exponents import make_exponent_block
from retrograd.views.report.facts import describe_data, describe_run
from retrograd.views.report.measures import choose_detail
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
    seen = [bool(line.any()) for line in ~np.isnan(counts.values)]
    sites = [site for site, is_seen in zip(counts.sites, seen, strict=True) if is_seen]
    detail = choose_detail(len(sites), len(counts.steps), columns, megabytes * 1e6 * _SHARE_OF_BLOCKS)
    shared = share_columns(counts.steps, detail.columns)
    blocks = Blocks(
        statistics=list(make_statistic_blocks(history, sites, shared, phase, detail.mantissa_bits)),
        loss=make_loss_block(history.loss.steps, history.loss.values, shared),
        exponents=make_exponent_block(history, sites, shared, phase),
    )
    events, places = history.events, group_places(sites)
    unseen = [site for site, is_seen in zip(counts.sites, seen, strict=True) if not is_seen]
    ranks = run.ranks if isinstance(run, Run) else ()
    facts = {
        **describe_run(run, history, events, counts.steps),
        **describe_data(places, sites, shared, blocks, detail),
        "elements": np.fmax.reduce(counts.values[seen], axis=1, initial=0).astype(int).tolist(),
        "nonfinite": find_first_nonfinite(history, places, phase),
        "recorded": describe_recorded(history.manifest, places, phase, significant_digits(detail.mantissa_bits)),
        "troubles": list_troubles(history.manifest, events, ranks, unseen),
        "model": list_modules(history.manifest.get("model")),
    }
    target = _choose_path(run, path)
    _write(target, build_page(facts["title"], facts, blocks.listed))
    return target


def _choose_path(run: Run | History, path: str | os.PathLike[str] | None) -> Path:
    if path is not None:
        return Path(path)
    return run.path / FILE_NAME if isinstance(run, Run) else Path(FILE_NAME)


def _write(target: Path, text: str) -> None:
    try:
        target.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise RunWriteError(
            f"The report cannot be written to {str(target)!r}: {error.strerror or error}.",
            repair="give a file in a folder that exists and can be written.",
        ) from error
