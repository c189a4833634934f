"""Parquet files that somebody else may have written: a small file may unpack to more than there is memory."""

from __future__ import annotations

import os

import pyarrow as pa
import pyarrow.parquet as pq

from retrograd.core.foreign.text import expect_file

LARGEST = 1 << 32
"""Bytes of a table that is read, unpacked."""

MOST_VALUES = 1 << 28
"""Values of one column."""

MOST_ROWS = 10_000_000
"""Rows of a table that becomes objects of Python."""


def check_table(metadata: pq.FileMetaData, *, most_rows: int | None = None) -> None:
    """Check that a file says of itself that it can be read into memory.

    Raises:
        ValueError: it does not.
    """
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    size = sum(group.total_byte_size for group in groups)
    if metadata.num_rows > (MOST_VALUES if most_rows is None else most_rows) or size > LARGEST:
        raise ValueError(f"{metadata.num_rows} rows of {size} bytes are too many")
    for column in range(metadata.num_columns):
        values = sum(group.column(column).num_values for group in groups)
        if values > MOST_VALUES:
            raise ValueError(f"{values} values in one column are too many")


def read_table(path: str | os.PathLike[str]) -> pa.Table:
    """All of a file that becomes objects of Python.

    Raises:
        pa.ArrowException, OSError, ValueError: it cannot be read.
    """
    with pq.ParquetFile(expect_file(path), page_checksum_verification=True) as file:
        check_table(file.metadata, most_rows=MOST_ROWS)
        return file.read()
