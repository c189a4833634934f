"""A run as one table: CSV, or Parquet; read and written piece by piece.

DuckDB, pandas, Polars and Spark need none; they read the part files as they are.
"""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from retrograd.addresses import read_path
from retrograd.files import write_file
from retrograd.history.rows import Picked, Rows
from retrograd.history.sink import PHASES
from retrograd.runs.reader import Run
from retrograd.statistics.row import STATISTICS, derive

_MOMENT = ("rank", "step", "micro", "backward")
_ROWS_AT_ONCE = 1 << 17
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


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


def export_parquet(run: Run, path: str | os.PathLike[str]) -> Path:
    """Write all rows of all ranks as one Parquet file, with the columns of :meth:`History.table`.

    Returns:
        Where it was written.
    """
    batches = run.history.to_batches()
    with write_file(path) as file, pyarrow.parquet.ParquetWriter(file, batches.schema, compression="zstd") as writer:
        for batch in batches:
            writer.write_batch(batch)
    return read_path(path)


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
