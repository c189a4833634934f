"""``rg.export``: a run for other tools."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from retrograd.core.addresses import local_path, read_path
from retrograd.core.errors import ExportError, NothingRecordedError, RunWriteError
from retrograd.core.exports.numbers import list_row_steps, list_steps, read_histograms, read_numbers, spread_steps
from retrograd.core.exports.tables import export_csv, export_parquet, export_scalars
from retrograd.core.exports.tracker import TRACKERS, open_tracker
from retrograd.core.files import refuse_link
from retrograd.core.guesses import names_arguments
from retrograd.core.history.matrix import check_name
from retrograd.core.runs.findings import explain_run
from retrograd.core.runs.reader import Given, Run, read_run
from retrograd.core.sites.pattern import Pattern
from retrograd.core.views.shown import find_phase

SCALARS = ("rms", "mean", "std", "abs_max", "zero_share", "nonfinite", "update_ratio")
"""Statistics that go to a tracker, and users' own."""

MOST_SCALARS = 1000
MOST_HISTOGRAMS = 100
"""Steps of a run that go to a tracker, none of which shows more of them."""

_TABLES = {"csv": export_csv, "parquet": export_parquet}
_PLACES = {"csv": "statistics.csv", "parquet": "statistics.parquet"}
"""Names in the run folder; that of the format where nothing is said."""


@names_arguments
def export(
    run: Given,
    to: str,
    path: str | os.PathLike[str] | None = None,
    *,
    sites: Pattern | Iterable[Pattern] | None = None,
    statistics: Sequence[str] | None = None,
) -> Path:
    """Write a run for other tools. Nothing is sent anywhere.

    Args:
        run: a run, its folder, or a recording to a folder.
        to: ``csv`` or ``parquet``, one file with all rows, and beside it one with ``history.scalars``
            (``statistics_scalars.csv``); or ``tensorboard``, ``wandb`` or ``mlflow``, a folder with
            ``history.scalars``, :data:`SCALARS` as ``rms/SITE`` …, exponents as histograms over log2 of the magnitude,
            and findings. Of long runs, a tracker is given evenly spaced steps.
        path: the file or folder; inside the run folder when left out.
        sites: which sites a tracker is given, as for :func:`retrograd.record`; all when left out.
        statistics: which statistics of them a tracker is given; :data:`SCALARS` and users' own when left out.

    Returns:
        Where it was written.

    Raises:
        ExportError: there is no such format, or a table is to hold a part of the run.
        NoSuchSiteError, PatternError, StatisticError: for what cannot be chosen.
        LibraryError: the library of a tracker is missing, or too old.
        NothingRecordedError: it is not a run on disk.
        NotARunError, DamagedRunError: the folder cannot be read.
        RunWriteError: it cannot be written there.
    """
    opened = read_run(run)
    if not isinstance(opened, Run):
        raise NothingRecordedError(
            "A history in memory is not a run on disk.", repair="record to a folder: rg.record(model, path)."
        )
    if to not in (*_TABLES, *TRACKERS):
        names = ", ".join(map(repr, (*_TABLES, *TRACKERS)))
        raise ExportError(f"A run is not exported to {to!r}.", repair=f"give one of {names}.")
    if to in _TABLES and not (sites is None and statistics is None):
        raise ExportError(
            f"Sites and statistics are not chosen for {to!r}.",
            repair="leave them out, and choose rows and columns where the table is read.",
            reason="a table holds the whole run, as the run folder does.",
        )
    history = opened.history
    chosen = history.sites if sites is None else history.select(sites)
    shown = (*SCALARS, *history.rows.custom) if statistics is None else tuple(statistics)
    for name in shown:
        check_name(name, history.rows.custom)
    try:
        if to in _TABLES:
            place = read_path(path or _find_place(opened, to))
            written = _TABLES[to](opened, place)
            if not place.exists() or place.is_file():  # no pipe, which takes one table
                export_scalars(opened, place.with_name(f"{place.stem}_scalars{place.suffix}"), to)
            return written
        place = Path(path) if path else local_path(_find_place(opened, to))
        return _export_to_tracker(opened, to, place, chosen, shown)
    except (BrokenPipeError, RunWriteError):  # who reads has seen enough, or it is told already
        raise
    except OSError as error:
        raise RunWriteError(
            f"The export cannot be written: {error.strerror or error}: {str(path or opened.path)!r}.",
            repair="give a place that exists and can be written: `--to csv -o FILE`.",
        ) from error


def _find_place(run: Run, to: str) -> Path:
    """A place in the run folder.

    Raises:
        RunWriteError: it is a link.
    """
    return refuse_link(run.path / _PLACES.get(to, to))


def _export_to_tracker(run: Run, to: str, folder: Path, sites: Sequence[str], statistics: Sequence[str]) -> Path:
    history = run.history
    phase = find_phase(history)
    tracker = open_tracker(to, run.path.name, folder)
    status = "failed"  # it is closed also where the export fails
    try:
        steps = spread_steps(list_steps(history, phase), MOST_SCALARS)
        for step, numbers in read_numbers(history, sites, statistics, phase, steps):
            tracker.add_numbers(step, numbers)
        steps = spread_steps(list_row_steps(history, phase), MOST_HISTOGRAMS)
        for step, name, exponents in read_histograms(history, sites, phase, steps):
            tracker.add_histogram(step, name, exponents)
        for finding in explain_run(run):
            tracker.add_finding(finding)
        status = run.status
    finally:
        tracker.close(status)
    return folder
