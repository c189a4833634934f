"""Tables in a folder of Parquet part files: added to, merged, and cut off where a resumed run begins anew.

With a part file a flush, a day would leave 43,200. Whenever ``LIMITS.fan_in`` neighbours of like size stand at the end
they become one, and those in turn; so each row is rewritten once for every factor of ``LIMITS.fan_in`` in the number of
flushes, and there are never more than ``LIMITS.fan_in`` files of a size.

The merged file appears before its parts go. Dying in between is harmless: a reader passes over a part whose span
lies inside another's, and the next writer removes it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from retrograd.core.addresses import is_remote, open_remote, reaching
from retrograd.core.errors import DamagedRunError, RunError
from retrograd.core.files import refuse_link, remove_unfinished, write_whole
from retrograd.core.foreign.tables import check_table
from retrograd.core.foreign.text import expect_file
from retrograd.core.history.arrays import read_numbers, to_numbers, view_numbers
from retrograd.core.history.rows import order_by_site
from retrograd.core.history.table import filter_rows
from retrograd.core.limits import LIMITS
from retrograd.core.runs.layout import Span, list_merged_parts, list_parts, parse_span
from retrograd.core.runs.part_outline import PartOutline

_CODED = frozenset({"phase", "site", "kind", "name"})
_REPETITIVE = frozenset({"scale", "reference"})

SORTED = b"retrograd.sorted"
"""Key of the metadata of a part that compacting has written: all of its rows are sorted."""


class PartFolder:
    """The part files of one table, of one rank.

    Args:
        folder: made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = refuse_link(folder)
        folder.mkdir(exist_ok=True)
        remove_merged(folder)
        remove_unfinished(folder)
        self.spans = [span for span, _ in list_parts(folder)]
        self._next = max((span.last for span in self.spans), default=-1) + 1

    def settle(self, folder: Path) -> bool:
        """Write to this folder from now on; it is made again, and True returned, where somebody has removed it.

        Raises:
            OSError: it cannot be made.
        """
        self.folder = folder
        is_missing = not folder.is_dir()
        if is_missing:
            folder.mkdir()
            self.forget_missing()
        return is_missing

    def forget_missing(self) -> None:
        """Somebody has removed part files: what is left can still be merged."""
        self.spans = [span for span in self.spans if self._path(span).exists()]

    def add(self, table: pa.Table) -> None:
        """Write one more part file.

        Raises:
            OSError: if it cannot be written; nothing has changed then.
        """
        span = Span(self._next, self._next)
        while self._path(span).exists():  # it is not ours: nothing is written over
            self._next += 1
            span = Span(self._next, self._next)
        write_part(self._path(span), table)
        self.spans.append(span)
        self._next += 1

    def cut(self, first_step: int) -> None:
        """Remove all rows of this step and later ones."""
        for span in list(self.spans):
            path = self._path(span)
            limits = _read_step_limits(path)
            if limits is None or limits[1] < first_step:
                continue
            table = read_part(path)
            kept = filter_rows(table, read_numbers(table["step"]) < first_step)
            if kept.num_rows:
                write_part(path, kept, check=read_back)
            else:
                path.unlink()
                self.spans.remove(span)

    def find_step_limits(self) -> tuple[int, int] | None:
        """The first and the last step of which there is a row."""
        found = (_read_step_limits(self._path(span)) for span in self.spans)
        limits = [each for each in found if each is not None]
        return (min(low for low, _ in limits), max(high for _, high in limits)) if limits else None

    def read_newest_first(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Columns of each part, the last one first."""
        return (read_part(self._path(span), list(columns)) for span in reversed(self.spans))

    def count_texts(self, name: str) -> Counter[str]:
        """How often each text is in a column."""
        counts: Counter[str] = Counter()
        for span in self.spans:
            for found in pc.value_counts(read_part(self._path(span), [name])[name]).to_pylist():
                counts[found["values"]] += found["counts"]
        return counts

    def count_rows(self) -> int:
        """Rows of all parts."""
        return sum(count_rows(self._path(span)) for span in self.spans)

    def _path(self, span: Span) -> Path:
        return self.folder / span.file_name


def write_part(path: Path, table: pa.Table, *, check: Callable[[Path], object] | None = None) -> None:
    """Write a table as one Parquet file, with its metadata: what is sorted by site in groups of some sites."""
    write_groups(path, table.schema, cut_by_site(table), table.schema.metadata or {}, check=check)


def cut_by_site(table: pa.Table) -> Iterator[pa.Table]:
    """The row groups of a table: between sites if it is sorted by them, so that of one site few rows are read.

    Each is of as many sites, a power of two: so parts of about the same size have groups of the same sites, and tell
    of them in the same words.
    """
    found = _number_sites(table)
    if found is None or len(found) <= LIMITS.site_rows or (np.diff(found) < 0).any():
        yield table
        return
    sites = int(np.count_nonzero(np.diff(found))) + 1
    width = max(LIMITS.site_rows * sites // len(found), 1)
    number = found >> (width.bit_length() - 1)
    starts = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(found)]
    for start, end in itertools.pairwise(starts):
        yield table.slice(start, end - start)


def sort_by_site(table: pa.Table) -> pa.Table:
    """The rows by site, those of each by step, in the order in which they were."""
    found = _number_sites(table)
    if found is None:
        return table
    order = order_by_site(found, read_numbers(table["step"]))
    return table.take(to_numbers(order)).combine_chunks()


def _number_sites(table: pa.Table) -> npt.NDArray[np.integer] | None:
    """The column of sites as numbers; None where there is none."""
    if "site" not in table.column_names:
        return None
    column = table["site"].combine_chunks()
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    return view_numbers(column.indices)


def write_groups(
    path: Path,
    schema: pa.Schema,
    groups: Iterable[pa.Table],
    told: Mapping[bytes, bytes],
    *,
    check: Callable[[Path], object] | None = None,
) -> None:
    """Write tables as the row groups of one Parquet file.

    Args:
        path: of the file, which appears whole.
        schema: that of all of them.
        groups: the tables.
        told: its metadata. Those of statistics tell their outline besides.
        check: called with the file before it appears, on a disk.
    """
    outline = PartOutline() if "site" in schema.names else None
    aside = path.parent.parent  # a reader of the folder takes each file in it for a part
    with write_whole(path, aside=aside) as file:
        with pq.ParquetWriter(file, schema, **parquet_options(schema)) as writer:
            for group in groups:
                writer.write_table(group, row_group_size=max(group.num_rows, 1))
                if outline is not None:
                    outline.add(group)
            writer.add_key_value_metadata({**told, **({} if outline is None else outline.tell())})
        if check is not None:
            file.flush()
            check(Path(file.name))


def count_rows(path: Path) -> int:
    """Rows of a part file, as it says itself."""
    return int(PartFile(path).metadata.num_rows)


def parquet_options(schema: pa.Schema) -> dict[str, Any]:
    """How the columns are packed.

    Bytes of a float64 that mean the same lie side by side (BYTE_STREAM_SPLIT), and so do those of the counts in
    histograms: measured, both the smallest and the fastest. The Arrow schema is left out, so that any reader sees
    plain strings where there are dictionaries.
    """
    split = [field.name for field in schema if pa.types.is_floating(field.type) and field.name not in _REPETITIVE]
    lists = [f"{field.name}.list.element" for field in schema if pa.types.is_list(field.type)]
    flat = [field.name for field in schema if not pa.types.is_list(field.type)]
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": [name for name in flat if name not in split],
        "column_encoding": dict.fromkeys([*split, *lists], "BYTE_STREAM_SPLIT"),
        "store_schema": False,
        "write_page_checksum": True,
    }


class PartFile:
    """A part file that is open. Little is held of it: readers of pyarrow keep what they last unpacked, so each is new.

    Args:
        path: of the file.

    Attributes:
        path: the same.
        metadata: its footer.
        held: bytes of its content that are in memory, as of one that was fetched from a store.

    Raises:
        DamagedRunError: it is not a Parquet file.
        FileNotFoundError: it is not there (any more).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with explain_damage(path):
            self._source, self.held = _open_source(path)
            self.metadata: pq.FileMetaData = pq.read_metadata(self._open())
            check_table(self.metadata)
            self._coded = [name for name in self.metadata.schema.names if name in _CODED]

    def open(self) -> pq.ParquetFile:
        """A reader, with texts as dictionaries. Several may be used at a time, each by one thread."""
        return pq.ParquetFile(
            self._open(),
            metadata=self.metadata,
            read_dictionary=self._coded,
            page_checksum_verification=True,
            pre_buffer=self._source is None,
        )

    def _open(self) -> pa.NativeFile:
        return pa.PythonFile(open_remote(self.path), mode="r") if self._source is None else self._source

    def read_group(self, number: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Some columns of one row group, or all of them."""
        names = self.metadata.schema.to_arrow_schema().names if columns is None else list(columns)
        return self.open().read_row_group(number, columns=names, use_threads=False)


def _open_source(path: Path) -> tuple[pa.NativeFile | None, int]:
    """A file to read, and how much of it is in memory; None for a large one in a store, which each reader opens."""
    if not is_remote(path):
        return pa.OSFile(str(expect_file(path))), 0
    found = open_remote(path)
    return (pa.BufferReader(found), len(found)) if isinstance(found, bytes) else (None, 0)


def read_part(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Columns of a part file, or all of it.

    Raises:
        DamagedRunError: it cannot be read.
    """
    part = PartFile(path)
    with explain_damage(path):
        return part.open().read(columns=columns, use_threads=False)


def read_back(path: Path) -> npt.NDArray[np.int64]:
    """The steps of a part, each once; all of its columns are read on the way, as is due before anything is removed.

    Raises:
        DamagedRunError: they cannot be.
    """
    file = PartFile(path)
    with explain_damage(path):
        groups = (file.read_group(number) for number in range(file.metadata.num_row_groups))
        found = [np.unique(read_numbers(group["step"])) for group in groups]
        return np.unique(np.concatenate([np.empty(0, np.int64), *found]))


@contextlib.contextmanager
def explain_damage(path: Path) -> Iterator[None]:
    """Turn what a library says of a damaged file into an error that names the file."""
    try:
        with reaching(path):
            yield
    except (FileNotFoundError, RunError, MemoryError):  # too little memory says nothing of the file
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, UnicodeDecodeError) as error:
        if "Failed to launch worker thread" in str(error):  # Arrow's threads take memory too
            raise MemoryError(str(error)) from error
        raise DamagedRunError(
            f"{str(path)!r} cannot be read: {error}",
            repair="move that file out of the folder to read the rest of the run.",
        ) from error


def explain_vanished(path: Path) -> DamagedRunError:
    """The error for a file that was there when its run was opened."""
    return DamagedRunError(
        f"{str(path)!r} is gone.",
        repair="refresh() the run, or open it again.",
        reason="the process that writes it has merged it into a larger file, or somebody removed it.",
    )


def remove_merged(folder: Path) -> None:
    """Remove parts that were merged into larger ones, by a process that was killed before it had removed them.

    Raises:
        DamagedRunError: a larger one cannot be read, or has not as many rows.
    """
    merged = list_merged_parts(folder)
    for span, path in list_parts(folder) if merged else ():
        own = [each for each in merged if span.contains(parse_span(each.name))]
        if own and read_back(path) is not None and count_rows(path) < sum(map(count_rows, own)):
            raise DamagedRunError(
                f"{str(path)!r} has fewer rows than the parts that were merged into it.",
                repair="move that file out of the folder; the parts are still there.",
            )
    for path in merged:
        path.unlink(missing_ok=True)


def _read_step_limits(path: Path) -> tuple[int, int] | None:
    """The first and the last step of a part; None where it has no rows.

    Raises:
        DamagedRunError: it cannot be read, or its steps are none.
    """
    steps = read_part(path, ["step"])["step"]
    with explain_damage(path):
        if not pa.types.is_integer(steps.type) or steps.null_count:
            raise ValueError("a row has no step")
        numbers = read_numbers(steps)
    return (int(numbers.min()), int(numbers.max())) if len(numbers) else None


# ---- small files become larger ones ----


def compact(parts: PartFolder) -> None:
    """Merge the last part files while there are enough of like size.

    Raises:
        OSError: if the merged file cannot be written; the parts are untouched then.
    """
    try:
        while (run := _find_mergeable(parts.spans)) and _count_rows(parts.folder, run) <= LIMITS.part_rows:
            merged = Span(run[0].first, run[-1].last)
            _merge_files([parts.folder / span.file_name for span in run], parts.folder / merged.file_name)
            parts.spans[-len(run) :] = [merged]
            for span in run:
                (parts.folder / span.file_name).unlink(missing_ok=True)
    except FileNotFoundError:
        parts.forget_missing()


def _find_mergeable(spans: Sequence[Span]) -> Sequence[Span]:
    last = spans[-LIMITS.fan_in :]
    alike = len(last) == LIMITS.fan_in and len({_level(span) for span in last}) == 1
    return last if alike else ()


def _level(span: Span) -> int:
    """How often this part has been merged."""
    level, flushes = 0, span.last - span.first + 1
    while flushes >= LIMITS.fan_in:
        flushes //= LIMITS.fan_in
        level += 1
    return level


def _merge_files(paths: Sequence[Path], merged: Path) -> None:
    files = [PartFile(path) for path in paths]
    schema = pa.unify_schemas([file.open().schema_arrow for file in files])
    told = files[-1].metadata.metadata or {}  # what the last part told holds for all
    write_groups(merged, schema, (group.cast(schema) for group in _regroup(files, schema)), told, check=read_back)


def _regroup(files: Sequence[PartFile], schema: pa.Schema) -> Iterator[pa.Table]:
    """The row groups of all files, with the columns of all; small files are joined, and sorted by site."""
    nothing = pa.Table.from_batches([], schema)
    waiting = [nothing]
    for file in files:
        groups = map(file.read_group, range(file.metadata.num_row_groups))
        if file.metadata.num_rows >= LIMITS.group_rows:
            yield from _sort_waiting(waiting)
            yield from groups
            waiting = [nothing]
            continue
        waiting += groups
        if sum(table.num_rows for table in waiting) >= LIMITS.group_rows:
            yield from _sort_waiting(waiting)
            waiting = [nothing]
    yield from _sort_waiting(waiting)


def _sort_waiting(tables: Sequence[pa.Table]) -> Iterator[pa.Table]:
    if len(tables) > 1:
        yield from cut_by_site(sort_by_site(_join(tables)))


def _join(tables: Sequence[pa.Table]) -> pa.Table:
    """Tables one after the other; a user's statistic that one of them lacks is missing there."""
    return pa.concat_tables(tables, promote_options="default").unify_dictionaries().combine_chunks()


def _count_rows(folder: Path, spans: Sequence[Span]) -> int:
    return sum(count_rows(folder / span.file_name) for span in spans)
