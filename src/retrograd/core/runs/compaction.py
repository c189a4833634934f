"""Rewrites the statistics of a run as few files, sorted by site: of one site little has to be read.

Killed at any moment it loses nothing. Files of one rank are replaced as those of any merge are: the new one holds their
span, so that a reader passes over what lies inside. Where ranks are merged, new files are written beside the old ones,
in a folder that nobody reads until the manifest says so, by one renaming; only then the old ones are removed. A new
file gets its name when it has been read back. What a compaction that was killed has left, the next one removes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from retrograd.core.addresses import is_address, is_remote, open_folder
from retrograd.core.amounts import count_of, show_bytes
from retrograd.core.errors import DamagedRunError, RunError, RunWriteError
from retrograd.core.files import refuse_link, remove_unfinished, write_json
from retrograd.core.history.arrays import read_codes, read_numbers, to_numbers, view_numbers
from retrograd.core.history.cells import MOMENT, IntArray, MergedTable, cell_of, locate, number_moments, split_moments
from retrograd.core.history.copies import CopyWatch
from retrograd.core.history.histograms import Histograms
from retrograd.core.history.outline import unite
from retrograd.core.history.rows import Columns, Part, StoredPart
from retrograd.core.history.table import STATISTICS_COLUMNS, build_table, filter_rows
from retrograd.core.history.windows import LongRows, read_once
from retrograd.core.limits import LIMITS
from retrograd.core.notices import tell_far, waiting
from retrograd.core.runs.copying import copy_run
from retrograd.core.runs.layout import LOCK, MANIFEST, MERGED, STATISTICS, Span, list_merged_parts, list_parts
from retrograd.core.runs.lock import Lock
from retrograd.core.runs.parts import (
    SORTED,
    PartFile,
    count_rows,
    explain_damage,
    read_back,
    remove_merged,
    write_groups,
)
from retrograd.core.runs.reader import Given, Run, open_run, read_run


@dataclass(frozen=True, slots=True)
class Compacted:
    """What compacting a run has saved.

    Attributes:
        files_before: files of statistics that there were.
        files_after: that there are now.
        bytes_before: of those files.
        bytes_after: of these.
        rows_before: rows that there were.
        rows_after: rows that there are.
        ranks: the ranks that were merged; empty where each has kept its own rows.
    """

    files_before: int
    files_after: int
    bytes_before: int
    bytes_after: int
    rows_before: int
    rows_after: int
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        merged = ""
        if self.ranks:
            merged = (
                f" The rows of {len(self.ranks)} ranks are merged: what each of them saw cannot be told apart any more."
            )
        return (
            f"{self.files_before:,} → {count_of(self.files_after, 'file')}, {show_bytes(self.bytes_before)} → "
            f"{show_bytes(self.bytes_after)}, {self.rows_before:,} → {count_of(self.rows_after, 'row')}.{merged}"
        )


def compact(
    run: Given, output: str | os.PathLike[str] | None = None, *, keep_ranks: bool = False, progress: bool = False
) -> Compacted:
    """Rewrite the statistics of a run as few files, sorted by site, and ranks merged.

    Numbers are those that were read of all ranks together before, to rounding; micro-batches stay apart. Tensors,
    events and all that was told beside stay as they are. Killed at any moment, the run reads as before, or as after.

    Args:
        run: its folder, or the run.
        output: a new folder for a compacted copy. The run stays as it is, and may go on being recorded: the copy has
            what was written until now.
        keep_ranks: leave the rows of each rank apart.
        progress: say on stderr how far it is, if that takes seconds.

    Returns:
        What it has saved.

    Raises:
        RunWriteError: it is still being recorded and no ``output`` is given, is no run on disk, or cannot be written.
        RunExistsError: there are files in ``output``.
        NotARunError, DamagedRunError: the folder, or a part of it, cannot be read; nothing has changed then.
    """
    if is_remote(run) or (isinstance(run, str | os.PathLike) and is_address(run)):
        _expect_disk(open_folder(cast("str | os.PathLike[str]", run)))  # before any of it is fetched
    opened = read_run(run)
    if not isinstance(opened, Run):
        raise RunWriteError("A history in memory has no files.", repair="give the folder of a run.")
    _expect_disk(opened.path)
    if output is not None:
        opened = _copy(opened, Path(output).absolute())
    opened = open_run(opened.path) if opened is run else opened  # the user's own goes on as it is
    rows = opened.history.rows.count
    words, is_long = f"compacting {count_of(rows, 'row')} of {opened.path}", rows > LIMITS.explained_rows
    with _hold_still(opened), waiting(words, is_long=is_long, follows=True) if progress else contextlib.nullcontext():
        _require_all(opened)
        _remove_unfinished(opened)
        _remove_merged(opened)
        before = _measure(opened)
        ranks = sorted({part.rank for part in _list_stored(opened)})
        try:
            if keep_ranks or len(ranks) < 2:
                _compact_each(opened)
                ranks = []
            else:
                _merge_ranks(opened, ranks)
        except RunError:
            raise
        except OSError as error:
            raise RunWriteError(
                f"{str(opened.path)!r} cannot be compacted: {error.strerror or error}.",
                repair="make room on the disk: until it is done there are old files and new ones.",
            ) from error
        after = _measure(opened)
    return Compacted(before[0], after[0], before[1], after[1], before[2], after[2], tuple(ranks))


def _expect_disk(path: Path) -> None:
    """Refuse a run in a store.

    Raises:
        RunWriteError: it is in one.
    """
    if is_remote(path):
        raise RunWriteError(
            f"{str(path)!r} is not a folder on a disk.",
            repair="copy the run to a disk, compact it there, and copy it back to another place.",
            reason="where files cannot be renamed, a reader might see half of it.",
        )


def _copy(run: Run, target: Path) -> Run:
    _expect_disk(open_folder(target))
    try:
        copy_run(run.path, [rank.folder for rank in run.ranks if not rank.is_extra], target)
    except RunError:
        raise
    except OSError as error:
        raise RunWriteError(
            f"{str(target)!r} cannot be written: {error.strerror or error}.", repair="give a folder that can be made."
        ) from error
    return open_run(target)


def _require_all(run: Run) -> None:
    """Read all of a run as it is now.

    Raises:
        DamagedRunError: a part cannot be read.
    """
    run.refresh()
    run.require_all()
    for part in run.damaged:
        raise DamagedRunError(
            f"{str(run.path)!r} is not compacted: {part.error.problem}",
            repair="copy that file again from where the run was recorded, or move it out of the folder.",
            reason="the files that are merged are removed, and what may still be saved of this one would be lost.",
        )
    for each in run.history.rows.parts:
        if isinstance(each, StoredPart):
            each.check()


class _Stored(NamedTuple):
    rank: int
    path: Path


def _list_stored(run: Run) -> list[_Stored]:
    return [_Stored(rank, path) for rank, path in run.list_statistics()]


def _measure(run: Run) -> tuple[int, int, int]:
    """Files of statistics, their bytes and their rows."""
    paths = [each.path for each in _list_stored(run)]
    return len(paths), sum(path.stat().st_size for path in paths), sum(map(count_rows, paths))


@contextlib.contextmanager
def _hold_still(run: Run) -> Iterator[None]:
    """Hold the locks of all ranks, so that nobody records to them meanwhile.

    Raises:
        RunWriteError: somebody does, or a folder of theirs is a link.
    """
    for rank in run.ranks:
        for folder in (rank.folder, rank.folder / STATISTICS, rank.folder / MERGED):
            refuse_link(folder)
    with contextlib.ExitStack() as stack:
        for rank in run.ranks:
            lock = Lock(rank.folder / LOCK)
            if not lock.acquire():
                raise RunWriteError(
                    f"{str(run.path)!r} is still being recorded, by rank {rank.rank}.",
                    repair="wait until the run is over, or make a compacted copy of what has been written: -o DIR, "
                    "compact(run, folder).",
                    reason="its process merges files itself while it writes.",
                )
            stack.callback(lock.release)
        yield


# ---- merged rows ----


class Moments(NamedTuple):
    """Cells of steps × kinds of moment × sites, of which a kind is a phase, a backward pass and a micro-batch.

    Attributes:
        steps: rising.
        kinds: numbers of the kinds, rising.
        codes: of the sites, rising.
    """

    steps: IntArray
    kinds: IntArray
    codes: IntArray

    def place(self, piece: Part) -> tuple[npt.NDArray[np.bool_], IntArray]:
        """Which rows are of these steps, and the cells of these."""
        step = locate(self.steps, piece["step"])
        mask = self.steps[step] == piece["step"]
        kind, site = locate(self.kinds, number_kinds(piece)), locate(self.codes, piece["site"])
        cells = (step * len(self.kinds) + kind) * len(self.codes) + site
        return mask, cells if mask.all() else cells[mask]

    def number(self, piece: Part, cells: IntArray) -> IntArray:
        """A number for the site and the moment of each row, of which these are the cells."""
        above, site = np.divmod(cells, len(self.codes))
        return number_moments(piece, above // len(self.kinds) * len(self.codes) + site)

    def find(self, moment: int) -> tuple[int, int]:
        """Step and site of such a number."""
        step, site = divmod(cell_of(moment), len(self.codes))
        return int(self.steps[step]), int(self.codes[site])


def number_kinds(piece: Part) -> IntArray:
    """A number for the phase, backward pass and micro-batch of each row."""
    return number_moments(piece, np.zeros(len(piece["step"]), np.int64))


def merge_moments(rows: LongRows, names: Sequence[str], differing: dict[str, list[int]]) -> Iterator[pa.Table]:
    """Tables of all rows, those of one moment and site merged, by rising step.

    Args:
        rows: of the run.
        names: of the sites, by code.
        differing: takes the sites whose copies differ: the first step, and two ranks.
    """
    found = [np.unique(number_kinds(piece)) for piece in rows.pieces(MOMENT)]
    kinds, steps = np.unique(np.concatenate([np.empty(0, np.int64), *found])), rows.outline.all_steps
    width = max(LIMITS.compacted_cells // max(len(kinds) * len(rows.codes), 1), 1)
    for start in range(0, len(steps), width):
        tell_far(step=f"{start:,} of {len(steps):,}")
        yield _merge_window(rows, Moments(steps[start : start + width], kinds, rows.codes), names, differing)


def _merge_window(rows: LongRows, cells: Moments, names: Sequence[str], differing: dict[str, list[int]]) -> pa.Table:
    size = len(cells.steps) * len(cells.kinds) * len(cells.codes)
    table, histograms, scale = MergedTable(rows, size), Histograms(size, 1), np.ones(size)
    watch = None if rows.copies is None else CopyWatch(rows.copies)
    columns = tuple(dict.fromkeys((*MOMENT, *rows)))
    for piece, numbers in read_once(rows, columns, cells, watch):
        table.add(piece, numbers)
        histograms.add(piece, numbers)
        scale[numbers] = piece["scale"]
    if watch is not None and rows.copies is not None:
        watch.settle()
        for moment, (shown, other) in sorted(watch.different.items()):
            step, code = cells.find(moment)
            differing.setdefault(rows.copies.name(code), [step, shown, other])
    return build_table(_lay_out(table, histograms, scale, cells), names)


def _lay_out(table: MergedTable, histograms: Histograms, scale: npt.NDArray[np.float64], cells: Moments) -> Columns:
    filled, columns = table.take()
    above, site = np.divmod(filled, len(cells.codes))
    step, kind = np.divmod(above, len(cells.kinds))
    columns |= {"step": cells.steps[step], "site": cells.codes[site], "scale": scale[filled]}
    columns |= split_moments(cells.kinds[kind])
    columns["first_bin"], columns["bin_count"], columns["bins"] = histograms.list_stretches(filled)
    return columns


# ---- writing ----


def _merge_ranks(run: Run, ranks: Sequence[int]) -> None:
    held, names = run.history.rows, run.history.written_names
    rows = LongRows(held.parts, None, held.merges, held.copies)
    old = [each.path for each in _list_stored(run)]
    if "compacted" in run.manifest:  # it is not so, and would be believed once there is such a folder
        run.manifest = {name: fact for name, fact in run.manifest.items() if name != "compacted"}
        write_json(run.path / MANIFEST, run.manifest)
    folder = run.ranks[0].folder / MERGED
    folder.mkdir(exist_ok=True)
    differing: dict[str, list[int]] = {}
    for number, table in enumerate(_collect(merge_moments(rows, names, differing))):
        _write(folder / Span(number, number).file_name, table)
    told = {**run.manifest, "compacted": {"ranks": list(ranks), "differing": differing}}
    write_json(run.path / MANIFEST, told)  # from here on the new files are read, and no others
    run.manifest = told
    for path in old:
        path.unlink(missing_ok=True)


def _remove_unfinished(run: Run) -> None:
    """Remove what a compaction has left that was killed before it was done; nobody else writes, since all is locked."""
    remove_unfinished(run.path, f"-{MANIFEST}")
    for rank in run.ranks:
        for folder, name in ((rank.folder, "-part-*"), (rank.folder / STATISTICS, ""), (rank.folder / MERGED, "")):
            remove_unfinished(folder, name)
        if not run.is_compacted:  # its manifest was not written, so nothing of it is read
            for _, path in list_parts(rank.folder / MERGED):
                path.unlink()


def _remove_merged(run: Run) -> None:
    """Remove files that were merged by a compaction which was killed before it had removed them.

    Raises:
        DamagedRunError: what should have replaced them cannot be read, or has not all of their steps.
    """
    merged = run.manifest.get("compacted", {}).get("ranks", ()) if run.is_compacted else ()
    folders = [rank.folder / STATISTICS for rank in run.ranks if rank.rank in merged and not rank.is_extra]
    listed = [(*list_merged_parts(folder), *(path for _, path in list_parts(folder))) for folder in folders]
    old = [path for paths in listed for path in paths]
    if not old:
        return
    kept = unite([read_back(each.path) for each in _list_stored(run)])
    for path in old:
        if not np.isin(read_back(path), kept).all():
            raise DamagedRunError(
                f"{str(path)!r} has steps that no file in {MERGED!r} has, though they were merged, as {MANIFEST} says.",
                repair=f"copy the folder {MERGED!r} again from where the run was compacted; where it never was, remove "
                f"'compacted' from {MANIFEST}.",
                reason="what was merged is removed, and nothing else holds these rows.",
            )
    for path in old:
        path.unlink(missing_ok=True)


def _compact_each(run: Run) -> None:
    """Rewrite the parts of each rank, some neighbours as one."""
    by_folder: dict[Path, list[Path]] = {}
    for each in _list_stored(run):
        by_folder.setdefault(each.path.parent, []).append(each.path)
    for rank, folder in enumerate(by_folder, 1):
        remove_merged(folder)
        parts = list_parts(folder)
        done = 0
        for neighbours in _group_neighbours(parts):
            tell_far(rank=f"{rank:,} of {len(by_folder):,}", part=f"{done:,} of {len(parts):,}")
            _rewrite(neighbours)
            done += len(neighbours)


def _group_neighbours(parts: Sequence[tuple[Span, Path]]) -> Iterator[list[tuple[Span, Path]]]:
    waiting: list[tuple[Span, Path]] = []
    rows = 0
    for part in parts:
        count = count_rows(part[1])
        if waiting and rows + count > LIMITS.compacted_part_rows:
            yield waiting
            waiting, rows = [], 0
        waiting.append(part)
        rows += count
    if waiting:
        yield waiting


def _rewrite(neighbours: Sequence[tuple[Span, Path]]) -> None:
    """Make one sorted part of some neighbours, or of a single one that is not sorted yet."""
    files = [PartFile(path) for _, path in neighbours]
    if len(files) < 2 and SORTED in (files[0].metadata.metadata or {}):
        return
    span = Span(neighbours[0][0].first, neighbours[-1][0].last)
    merged = neighbours[0][1].parent / span.file_name
    _write_groups(merged, files[-1].metadata.metadata or {}, _sort_rows(files))
    for _, path in neighbours:
        if path != merged:
            path.unlink(missing_ok=True)


def _sort_rows(files: Sequence[PartFile]) -> Iterator[pa.Table]:
    """All rows by site, each site's by step, in the order in which they were.

    They are read once for as many as may be held at a time; of all of them only sites and steps are held.
    """
    schema = _unite_schemas(files)
    code_of: dict[str, int] = {}
    sites, steps = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
    for group in _list_groups(files, schema, ["site", "step"]):
        sites.append(read_codes(group["site"], code_of))
        steps.append(read_numbers(group["step"]))
    order = np.lexsort((np.concatenate(steps), np.concatenate(sites)))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    for start in range(0, max(len(order), 1), LIMITS.compacted_part_rows):
        chosen, places, at = [pa.Table.from_batches([], schema)], [np.empty(0, np.int64)], 0
        for group in _list_groups(files, schema):
            own = place[at : at + len(group)] - start
            at += len(group)
            mask = (own >= 0) & (own < LIMITS.compacted_part_rows)
            chosen.append(filter_rows(group, mask))
            places.append(own[mask])
        table = _join(chosen)
        yield from _take_groups(table, np.argsort(np.concatenate(places)))


def _list_groups(
    files: Sequence[PartFile], schema: pa.Schema, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """The row groups of all files, with the types of a schema that has all of their columns."""
    for file in files:
        for number in range(file.metadata.num_row_groups):
            with explain_damage(file.path):
                group = file.read_group(number, columns)
                group = group.cast(pa.schema([schema.field(name) for name in group.column_names]))
            yield group


def _unite_schemas(files: Sequence[PartFile]) -> pa.Schema:
    """The columns of all files, with the types that we write: another tool may have made others of them."""
    found = dict.fromkeys(name for file in files for name in file.open().schema_arrow.names)
    types = {column.name: column.type for column in STATISTICS_COLUMNS}
    return pa.schema([(name, types.get(name, pa.float64())) for name in found])


def _collect(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Tables of about as many rows as a part has."""
    waiting: list[pa.Table] = []
    for table in tables:
        waiting.append(table)
        if sum(each.num_rows for each in waiting) >= LIMITS.compacted_part_rows:
            yield _join(waiting)
    if waiting:
        yield _join(waiting)


def _join(waiting: list[pa.Table]) -> pa.Table:
    """Tables one after the other; the list is emptied, so that they are not held besides."""
    joined = pa.concat_tables(waiting, promote_options="default").unify_dictionaries()
    waiting.clear()
    return joined.combine_chunks()


def _write(path: Path, table: pa.Table) -> None:
    """Write a part whose rows are sorted by site, each site's by step, in the order in which they were."""
    column = table["site"].combine_chunks()
    column = column if isinstance(column, pa.DictionaryArray) else column.chunk(0)
    order = np.lexsort((read_numbers(table["step"]), view_numbers(column.indices)))
    _write_groups(path, table.schema.metadata or {}, _take_groups(table, order))


def _take_groups(table: pa.Table, order: IntArray) -> Iterator[pa.Table]:
    """Rows in some order, a row group at a time."""
    for start in range(0, max(len(order), 1), LIMITS.compacted_group_rows):
        yield table.take(to_numbers(order[start : start + LIMITS.compacted_group_rows])).combine_chunks()


def _write_groups(path: Path, told: Mapping[bytes, bytes], groups: Iterator[pa.Table]) -> None:
    first = next(groups)
    write_groups(path, first.schema, chain([first], groups), {**told, SORTED: b"site, step"}, check=read_back)
