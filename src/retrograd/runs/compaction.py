"""Merging small part files into larger ones, so that a long run has few of them.

With a part file a flush, a day would leave 43,200. Whenever ``FAN_IN`` neighbours of like size stand at the end
they become one, and those in turn; so each row is rewritten once for every factor of ``FAN_IN`` in the number of
flushes, and there are never more than ``FAN_IN`` files of a size.

The merged file appears before its parts go. Dying in between is harmless: a reader passes over a part whose span
lies inside another's, and the next writer removes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from retrograd.files import write_whole
from retrograd.runs.layout import Span
from retrograd.runs.parts import PartFolder, open_part, parquet_options

FAN_IN = 32
MAX_ROWS = 1_000_000
"""Parts larger than this are let be, so that no merge takes long."""
ROWS_A_GROUP = 1 << 15
"""Rows that are held in memory while merging."""


def compact(parts: PartFolder) -> None:
    """Merge the last part files while there are enough of like size.

    Raises:
        OSError: if the merged file cannot be written; the parts are untouched then.
    """
    try:
        while (run := _find_mergeable(parts.spans)) and _count_rows(parts.folder, run) <= MAX_ROWS:
            merged = Span(run[0].first, run[-1].last)
            _merge_files([parts.folder / span.file_name for span in run], parts.folder / merged.file_name)
            parts.spans[-len(run) :] = [merged]
            for span in run:
                (parts.folder / span.file_name).unlink(missing_ok=True)
    except FileNotFoundError:
        parts.forget_missing()


def _find_mergeable(spans: Sequence[Span]) -> Sequence[Span]:
    last = spans[-FAN_IN:]
    alike = len(last) == FAN_IN and len({_level(span) for span in last}) == 1
    return last if alike else ()


def _level(span: Span) -> int:
    """How often this part has been merged."""
    level, flushes = 0, span.last - span.first + 1
    while flushes >= FAN_IN:
        flushes //= FAN_IN
        level += 1
    return level


def _merge_files(paths: Sequence[Path], merged: Path) -> None:
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open_part(path)) for path in paths]
        schema = pa.unify_schemas([file.schema_arrow for file in files])
        target = stack.enter_context(write_whole(merged))
        writer = stack.enter_context(pq.ParquetWriter(target, schema, **parquet_options(schema)))
        for group in _regroup(files):
            writer.write_table(group.cast(schema))


def _regroup(files: Sequence[pq.ParquetFile]) -> Iterator[pa.Table]:
    """The row groups of all files, small ones joined."""
    waiting: list[pa.Table] = []
    for file in files:
        for number in range(file.num_row_groups):
            waiting.append(file.read_row_group(number, use_threads=False))
            if sum(table.num_rows for table in waiting) >= ROWS_A_GROUP:
                yield _join(waiting)
                waiting = []
    if waiting:
        yield _join(waiting)


def _join(tables: Sequence[pa.Table]) -> pa.Table:
    """Tables one after the other; a user's statistic that one of them lacks is missing there."""
    return pa.concat_tables(tables, promote_options="default").unify_dictionaries().combine_chunks()


def _count_rows(folder: Path, spans: Sequence[Span]) -> int:
    return sum(pq.read_metadata(folder / span.file_name).num_rows for span in spans)
