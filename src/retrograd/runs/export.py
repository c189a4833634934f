"""A run for other tools: CSV, and TensorBoard event files.

DuckDB, pandas, Polars and Spark need no export; they read the part files as they are.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv

from retrograd.addresses import is_remote, local_path, read_path
from retrograd.errors import ExportError, NothingRecordedError, RunError, RunWriteError
from retrograd.files import write_file
from retrograd.history.rows import Picked, Rows
from retrograd.history.series import Series
from retrograd.history.sink import PHASES
from retrograd.runs.reader import Given, Run, read_run
from retrograd.statistics.row import EXPONENT_BIAS, STATISTICS, derive

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

SCALARS = ("rms", "mean", "std", "abs_max", "zero_share", "nonfinite", "update_ratio")
"""Statistics that go to TensorBoard."""

MOST_SCALARS = 1000
MOST_HISTOGRAMS = 100
"""Steps of a site that go to TensorBoard, which shows no more of them anyway."""

_MOMENT = ("rank", "step", "micro", "backward")
_ROWS_AT_ONCE = 1 << 17
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def export(run: Given, to: str, path: str | os.PathLike[str] | None = None) -> Path:
    """Write a run for other tools.

    Args:
        run: a run, its folder, or a recording to a folder.
        to: ``csv`` or ``tensorboard``.
        path: the file, or for TensorBoard the folder; inside the run folder when left out.

    Returns:
        Where it was written.

    Raises:
        ExportError: there is no such format.
        RunError: TensorBoard is not installed.
        NothingRecordedError: it is not a run on disk.
        NotARunError, DamagedRunError: the folder cannot be read.
        RunWriteError: it cannot be written there.
    """
    opened = read_run(run)
    if not isinstance(opened, Run):
        raise NothingRecordedError(
            "A history in memory is not a run on disk.", repair="record to a folder: rg.record(model, path)."
        )
    if to not in ("csv", "tensorboard"):
        raise ExportError(f"A run is not exported to {to!r}.", repair="give 'csv' or 'tensorboard'.")
    try:
        if to == "csv":
            return export_csv(opened, path or _find_place(opened, "statistics.csv"))
        return export_tensorboard(opened, path or local_path(_find_place(opened, "tensorboard")))
    except (BrokenPipeError, RunWriteError):  # who reads has seen enough, or it is told already
        raise
    except OSError as error:
        raise RunWriteError(
            f"The export cannot be written: {error.strerror or error}: {str(path or opened.path)!r}.",
            repair="give a place that exists and can be written: `--to csv -o FILE`.",
        ) from error


def _find_place(run: Run, name: str) -> Path:
    """A place in the run folder, which somebody else may have made, so that it may be a link to anywhere.

    Raises:
        RunWriteError: it is a link.
    """
    path = run.path / name
    if not is_remote(path) and path.is_symlink():
        raise RunWriteError(f"{str(path)!r} is a link.", repair="remove it, or say where to write.")
    return path


def export_csv(run: Run, path: str | os.PathLike[str]) -> Path:
    """Write all rows as CSV: a line is one site at one moment on one rank, with every statistic.

    A site that begins as a formula of a spreadsheet does (``=``, ``+``, ``-``, ``@``) has a quote before it.

    Returns:
        Where it was written.
    """
    rows, sites = run.history.rows, pa.array(map(_defuse, run.history.site_names), pa.string())
    schema = _build_lines(rows, sites, slice(0)).schema
    with write_file(path) as file, pyarrow.csv.CSVWriter(file, schema) as writer:
        for start in range(0, rows.count, _ROWS_AT_ONCE):
            writer.write_table(_build_lines(rows, sites, slice(start, start + _ROWS_AT_ONCE)))
    return read_path(path)


def export_tensorboard(run: Run, path: str | os.PathLike[str]) -> Path:
    """Write TensorBoard event files: the loss, :data:`SCALARS` as ``rms/SITE`` …, and exponents as histograms.

    A histogram is over log2 of the magnitudes. Of long runs, evenly spaced steps are written.

    Returns:
        The folder.

    Raises:
        RunError: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter  # an optional dependency
    except ImportError as error:
        raise RunError(
            "TensorBoard is not installed.", repair="pip install 'retrograd[tensorboard]', or export to CSV."
        ) from error
    history = run.history
    with SummaryWriter(log_dir=os.fspath(path)) as writer:
        _add_scalars(writer, "loss", *history.loss)
        for site in history.sites:
            series = history[site]
            for statistic in SCALARS:
                _add_scalars(writer, f"{statistic}/{site}", series.steps, series.statistic(statistic))
            _add_histograms(writer, f"exponents/{site}", series)
    return Path(path)


def _defuse(name: str) -> str:
    """A name that a spreadsheet would run as a formula gets a quote before it."""
    return f"'{name}" if name.startswith(_FORMULA) else name


def _build_lines(rows: Rows, sites: pa.Array, index: slice) -> pa.Table:
    picked = Picked(rows, index)
    columns = {name: pa.array(picked[name]) for name in _MOMENT}
    columns["phase"] = pa.array(PHASES).take(pa.array(picked["phase"]))
    columns["site"] = sites.take(pa.array(picked["site"]))
    columns |= {name: pa.array(derive(picked, name)) for name in STATISTICS}
    columns |= {name: pa.array(picked[name]) for name in ("order", "scale", *rows.custom)}
    return pa.table(columns)


def _add_scalars(
    writer: SummaryWriter, tag: str, steps: npt.NDArray[np.int64], values: npt.NDArray[np.float64]
) -> None:
    if np.isnan(values).all():  # does not apply to this site
        return
    for place in _spread(len(steps), MOST_SCALARS):
        writer.add_scalar(tag, values[place], int(steps[place]))


def _add_histograms(writer: SummaryWriter, tag: str, series: Series) -> None:
    steps, counts = series.exponents
    for place in _spread(len(steps), MOST_HISTOGRAMS):
        used = np.flatnonzero(counts[place])
        if not len(used):
            continue
        first, last = int(used[0]), int(used[-1])
        limits = np.arange(first, last + 1, dtype=np.float64) - EXPONENT_BIAS + 1
        buckets = counts[place, first : last + 1].astype(np.float64)
        writer.add_histogram_raw(
            tag,
            min=limits[0] - 1,
            max=limits[-1],
            num=buckets.sum(),
            sum=(buckets * (limits - 0.5)).sum(),
            sum_squares=(buckets * (limits - 0.5) ** 2).sum(),
            bucket_limits=limits.tolist(),
            bucket_counts=buckets.tolist(),
            global_step=int(steps[place]),
        )


def _spread(n: int, most: int) -> list[int]:
    """At most so many places among n, evenly spaced, the first and the last among them."""
    return sorted({int(place) for place in np.linspace(0, n - 1, min(n, most))})
