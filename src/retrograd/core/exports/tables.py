"""A run as one table: CSV, or Parquet; read and written piece by piece.

DuckDB, pandas, Polars and Spark need none; they read the part files as they are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from retrograd.core.addresses import read_path
from retrograd.core.files import write_file
from retrograd.core.history.rows import FIXED_TYPES, ROW_TYPES, Part
from retrograd.core.history.sink import PHASES
from retrograd.core.runs.reader import Run
from retrograd.core.statistics.row import STATISTICS, derive

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
    names = [*_MOMENT, "phase", "site", *ROW_TYPES, "scale", *rows.custom]
    none = {name: np.empty(0, FIXED_TYPES.get(name, np.float64)) for name in names}
    with write_file(path) as file, pyarrow.csv.CSVWriter(file, _build_lines(none, sites, rows.custom).schema) as writer:
        for piece in rows.pieces(names):
            for start in range(0, len(piece["step"]), _ROWS_AT_ONCE):
                some = {name: column[start : start + _ROWS_AT_ONCE] for name, column in piece.items()}
                writer.write_table(_build_lines(some, sites, rows.custom))
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


def export_scalars(run: Run, path: str | os.PathLike[str], to: str) -> Path:
    """Write ``history.scalars`` as CSV or Parquet: a line a step, a column each; empty where a step has none.

    Returns:
        Where it was written.
    """
    table = run.history.scalars.to_arrow()
    table = table.rename_columns([_defuse(name) for name in table.column_names]) if to == "csv" else table
    write = pyarrow.csv.write_csv if to == "csv" else pyarrow.parquet.write_table
    with write_file(path) as file:
        write(table, file)
    return read_path(path)


def _defuse(name: str) -> str:
    """A name that a spreadsheet would run as a formula gets a quote before it."""
    return f"'{name}" if name.startswith(_FORMULA) else name


def _build_lines(rows: Part, sites: pa.Array, custom: Sequence[str]) -> pa.Table:
    columns = {name: pa.array(rows[name]) for name in _MOMENT}
    columns["phase"] = pa.array(PHASES).take(pa.array(rows["phase"]))
    columns["site"] = sites.take(pa.array(rows["site"]))
    columns |= {name: pa.array(derive(rows, name)) for name in STATISTICS}
    columns |= {name: pa.array(rows[name]) for name in ("order", "scale", *custom)}
    return pa.table(columns)
