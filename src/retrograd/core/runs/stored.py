"""The rows and tensors of a run folder, read when they are first asked for."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors

from retrograd.core.addresses import is_remote, reaching
from retrograd.core.errors import DamagedRunError, RunUnreachableError
from retrograd.core.foreign.text import fits
from retrograd.core.history.arrays import read_codes, read_numbers, view_numbers
from retrograd.core.history.kept import Kept, unscale
from retrograd.core.history.outline import IntArray
from retrograd.core.history.rows import FIXED_TYPES, Columns, Part, StoredPart
from retrograd.core.history.sink import Event, Moment
from retrograd.core.history.table import STATISTICS_NAMES
from retrograd.core.limits import LIMITS
from retrograd.core.runs.damage import DamagedPart, Damages, Listed, is_lasting
from retrograd.core.runs.layout import list_shards, number_file
from retrograd.core.runs.part_check import check_column, check_phases, check_rows, check_steps, check_types, find_phase
from retrograd.core.runs.part_outline import (
    OUTLINED,
    PHASE_CODES,
    SITES,
    STEPS,
    PartOutline,
    PartSites,
    SiteLists,
    read_runs,
    renumber,
)
from retrograd.core.runs.parts import PartFile, explain_damage, explain_vanished
from retrograd.core.runs.placements import Placements

if TYPE_CHECKING:
    import torch

_LARGEST = np.iinfo(np.uint32).max
_ANY_STEP = int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max)
_BINS = "bins.list.element"
_LATER_COLUMNS = frozenset({"order"})
"""Columns that records have not always had; −1 where they are missing."""

_NONFINITE = ("nan", "pos_inf", "neg_inf")
_OFTEN_CONSTANT = frozenset({"phase", "micro", "backward", "calls", *_NONFINITE})
"""Columns whose rows are mostly all the same, which the footer then tells; what it tells of floats leaves NaN out."""

_DESCRIBED = _OFTEN_CONSTANT | {"step", _BINS}

_GROUPS_OF_A_FILE = 3
"""What an open file counts for besides, so that there are 256 at most, of the 1024 that a process may have."""

_BYTES_OF_A_GROUP = 1 << 15
"""What is held of files that were fetched from a store makes a row group more; so that is 16 MB, or one file."""


class OpenFiles:
    """Part files that are open: those used last, as many as the system and the memory for their footers allow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[StoredRows, PartFile] = OrderedDict()
        self._groups = 0

    def take(self, part: StoredRows) -> PartFile:
        """The open file of a part.

        Raises:
            DamagedRunError: it cannot be read.
            FileNotFoundError: it is not there any more.
        """
        with part.opening:  # another thread may be fetching it
            with self._lock:
                file = self._files.pop(part, None)
                if file is not None:
                    self._files[part] = file
                    return file
            file = PartFile(part.path)
            self.put(part, file)
            return file

    def put(self, part: StoredRows, file: PartFile) -> None:
        """Keep the file of a part open, of which there was none."""
        with self._lock:
            self._groups += _weigh(file)
            self._files[part] = file
            while self._groups > LIMITS.open_groups and len(self._files) > 1:
                _, oldest = self._files.popitem(last=False)  # whoever reads it still holds it
                self._groups -= _weigh(oldest)

    def keep_only(self, parts: Iterable[StoredRows]) -> None:
        """Forget parts that a run has no more; whoever still reads them opens them again, or is told."""
        kept = set(parts)
        with self._lock:
            for part in [each for each in self._files if each not in kept]:
                part.hold(self._files.pop(part))
            self._groups = sum(map(_weigh, self._files.values()))


def _weigh(file: PartFile) -> int:
    return int(file.metadata.num_row_groups) + _GROUPS_OF_A_FILE + file.held // _BYTES_OF_A_GROUP


class StoredRows(StoredPart):
    """Columns of a part file, which are read when they are asked for.

    The file stays open as long as not too many are, and can be read then though its writer has merged it into a larger
    one meanwhile.

    Args:
        path: of the file.
        file: it, open.
        lists: the sites, to which those of this file are added.
        rank: the rank it is from.
        rename: the name in ``names`` of a site of this file.
        files: where it is opened.
        damages: takes a file that turns out to be damaged when it is read; from then on it has no rows.

    Raises:
        DamagedRunError: it cannot be read; the columns themselves raise it too.
    """

    def __init__(
        self,
        path: Path,
        file: PartFile,
        lists: SiteLists,
        rank: int,
        rename: Callable[[str], str],
        files: OpenFiles,
        damages: Damages,
    ) -> None:
        self.path = path
        self.is_far = is_remote(path)
        self.opening = threading.Lock()
        self.rank = rank
        self._files = files
        self._held: PartFile | None = None
        self._damages, self._is_damaged, self._is_checked = damages, False, False
        self._is_large = self.is_far and not file.held
        self._lists, self._rename = lists, rename
        self._files.put(self, file)
        schema = file.open().schema_arrow
        found = schema.names
        self._names = [*FIXED_TYPES, *(name for name in found if name not in STATISTICS_NAMES)]
        self._has_order = "order" in found
        with explain_damage(path):
            check_types(schema.remove_metadata())
            missing = STATISTICS_NAMES.difference(found, _LATER_COLUMNS)
            if missing:
                raise ValueError(f"it lacks the columns {', '.join(sorted(missing))}")
            self.written: int = file.metadata.num_rows
            columns = {name: at for at, name in enumerate(_list_columns(file.metadata.schema)) if name in _DESCRIBED}
            groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
            self._groups = [_describe_group(group, columns) for group in groups]
            self.entries = sum(group.entries for group in self._groups)
            lows, highs = zip(*(group.steps for group in self._groups), strict=True) if self._groups else ((0,), (0,))
            self.step_limits, self.ends = (min(lows), max(highs)), highs
            self.step_runs, sites = self._outline(file)
            self.codes, self.orders, self._codes_of_groups = sites.codes, sites.orders, sites.of_groups

    @property
    def count(self) -> int:  # type: ignore[override]  # fewer once some turn out to be damaged
        """Number of rows."""
        return self.written - self.left_out

    @property
    def left_out(self) -> int:  # type: ignore[override]  # all of them once one turns out to be damaged
        """Number of rows that are not read, since the file is damaged, as far as that was found out."""
        return self.written if self._is_damaged else 0

    def hold(self, file: PartFile) -> None:
        """Keep this part's file open as long as the part itself is used."""
        self._held = file

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name not in self._names:
            raise KeyError(name)
        wanted = ("bin_count", "bins") if name in ("bin_count", "bins") else (name,)
        self.check()
        if name == "bins" and self._stretches is not None:
            stretches, self._stretches = self._stretches, None
            return stretches
        pieces = [read() for read in self.plan(wanted)]
        if name == "bin_count":  # whoever asks for the lengths will ask for the values next
            self._stretches = np.concatenate([np.empty(0, np.uint32), *(piece["bins"] for piece in pieces)])
        empty = np.empty(0, np.uint32 if name == "bins" else FIXED_TYPES.get(name, np.float64))
        return np.concatenate([piece[name] for piece in pieces]) if pieces else empty

    _stretches: npt.NDArray[Any] | None = None

    def __contains__(self, name: object) -> bool:
        return name in self._names  # a Mapping would read the column to find out

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def plan(
        self,
        names: Sequence[str],
        first: int | None = None,
        last: int | None = None,
        codes: npt.NDArray[np.integer] | None = None,
        *,
        nonfinite: bool = False,
    ) -> Iterator[Callable[[], Part]]:
        """See StoredPart; a piece is a row group, or some small neighbours together."""
        wanted: list[int] = []
        for number, group in enumerate(self._groups):
            low, high = group.steps
            if (last is not None and low > last) or (first is not None and high < first):
                continue
            if nonfinite and not any(group.constants.get(name, 1) for name in _NONFINITE):
                continue
            if self._may_have(number, codes):
                wanted.append(number)
        for numbers in self._join_neighbours(wanted):
            if self._is_damaged:
                return
            yield partial(self._read_still, numbers, tuple(names))

    def _join_neighbours(self, wanted: Iterable[int]) -> Iterator[tuple[int, ...]]:
        """Row groups that are read together."""
        joined, rows = list[int](), 0
        for number in wanted:
            rows += self._groups[number].count
            if joined and rows > LIMITS.rows_at_once:
                yield tuple(joined)
                joined, rows = [], self._groups[number].count
            joined.append(number)
        if joined:
            yield tuple(joined)

    def _outline(self, file: PartFile) -> tuple[dict[int, IntArray], PartSites]:
        """Steps by phase, and sites: as the footer tells, else as the rows do, read group by group."""
        groups = [group.count for group in self._groups]
        told = file.metadata.metadata or {}
        if STEPS in told and SITES in told:
            runs = read_runs(told[STEPS], groups, self.step_limits)
            if runs is not None:
                return runs, self._lists.read(told[SITES], self.rank, self._rename, len(groups))
        outline = PartOutline()
        for number in range(len(groups)):
            columns = [name for name in OUTLINED if name != "order" or self._has_order]
            group = file.read_group(number, columns)
            for name in columns:
                check_column(name, group[name])
            check_steps(read_numbers(group["step"]))
            outline.add(group)
        names, runs = [self._rename(name) for name in outline.code_of], outline.list_runs()
        check_phases(runs)
        return runs, renumber(names, outline.list_sites(), self._lists.code_of)

    def _read_sites(self, column: pa.ChunkedArray) -> npt.NDArray[np.int32]:
        return self._lists.read_codes(column, self._rename)

    def check(self) -> None:
        """See StoredPart. Of a large object in a store that would be many bytes: there a damaged one raises."""
        if not self._is_checked and not self._is_large:
            for numbers in self._join_neighbours(range(len(self._groups))):
                self._read_still(numbers, self._names)
        self._is_checked = True

    def _may_have(self, number: int, codes: npt.NDArray[np.integer] | None) -> bool:
        """Return whether a row group may have rows of some sites; None for all."""
        own = self._codes_of_groups.get(number)
        return codes is None or own is None or len(np.intersect1d(own, codes, assume_unique=True)) > 0

    def _read_still(self, numbers: Sequence[int], names: Sequence[str]) -> Columns:
        """Columns of some row groups; no rows where its file turns out to be damaged, of which there is a warning.

        Raises:
            DamagedRunError: it is gone, or the system cannot read it now.
        """
        try:
            if not self._is_damaged:
                return self._read_groups(numbers, names)
        except FileNotFoundError as error:
            raise explain_vanished(self.path) from error
        except DamagedRunError as error:
            if not (is_lasting(error) and self._damages.may_leave_out) or self._is_checked:
                raise
            if not self._is_damaged:
                self._is_damaged = True
                steps = None if self.step_limits == _ANY_STEP else self.step_limits
                self._damages.leave_out(DamagedPart(self.path, error, steps=steps))
        return {name: np.empty(0, FIXED_TYPES.get(name, np.float64)) for name in names}

    def _read_groups(self, numbers: Sequence[int], names: Sequence[str]) -> Columns:
        group = _join_groups([self._groups[number] for number in numbers])
        stored = self._list_stored(group, names)
        with explain_damage(self.path):
            plain = [name for name in stored if name != "bins"]
            reader = (self._held or self._files.take(self)).open() if stored else None
            table = reader.read_row_groups(numbers, columns=plain, use_threads=False) if reader and plain else None
            bins = _read_bins(reader, numbers, group.are_bins_small) if reader and "bins" in stored else None
            return self._lay_out(group, names, table, bins)

    def _list_stored(self, group: _RowGroup, names: Sequence[str]) -> list[str]:
        """Columns that have to be read for these; the others are the same in each row."""
        stored = ["bins" if name == "bin_count" else name for name in names if name not in group.constants]
        return list(dict.fromkeys(name for name in stored if name != "rank" and (name != "order" or self._has_order)))

    def _lay_out(
        self,
        group: _RowGroup,
        names: Sequence[str],
        table: pa.Table | None,
        bins: tuple[npt.NDArray[np.int32], npt.NDArray[Any]] | None,
    ) -> Columns:
        constant = {name: group.constants[name] for name in names if name in group.constants}
        columns: Columns = {}
        for name in names:
            if name in constant or name == "rank" or (name == "order" and not self._has_order):
                value = self.rank if name == "rank" else constant.get(name, -1)
                columns[name] = np.broadcast_to(np.array(value, FIXED_TYPES[name]), group.count)
            elif name not in ("bins", "bin_count") and table is not None:
                columns[name] = self._convert(name, table[name])
        if bins is not None:
            columns["bin_count"], columns["bins"] = bins
        if any(len(column) != group.count for name, column in columns.items() if name != "bins"):
            raise ValueError("columns of a row group differ in length")
        check_rows(columns, self.codes, self.step_runs)
        return columns

    def _convert(self, name: str, column: pa.ChunkedArray) -> npt.NDArray[Any]:
        check_column(name, column)
        if name == "site":
            return self._read_sites(column)
        if name in _LATER_COLUMNS:  # rows from before may have been merged with later ones
            column = column.fill_null(-1) if column.null_count else column
        if name == "phase":
            return read_codes(column, dict(PHASE_CODES)).astype(np.uint8)
        return read_numbers(column)


@dataclass(frozen=True, slots=True)
class _RowGroup:
    """A row group, as its footer tells.

    Attributes:
        count: of its rows.
        steps: the first and the last.
        constants: columns of which all rows are the same.
        are_bins_small: no entry of a histogram has more than 32 bits.
        entries: number of entries of all histograms, at most.
    """

    count: int
    steps: tuple[int, int]
    constants: dict[str, int]
    are_bins_small: bool
    entries: int


def _join_groups(groups: Sequence[_RowGroup]) -> _RowGroup:
    """Neighbours as one."""
    first, *others = groups
    if not others:
        return first
    lows, highs = zip(*(each.steps for each in groups), strict=True)
    are_same = {
        name: value
        for name, value in first.constants.items()
        if all(each.constants.get(name) == value for each in others)
    }
    return _RowGroup(
        count=sum(each.count for each in groups),
        steps=(min(lows), max(highs)),
        constants=are_same,
        are_bins_small=all(each.are_bins_small for each in groups),
        entries=sum(each.entries for each in groups),
    )


def _list_columns(schema: pq.ParquetSchema) -> list[str]:
    return [schema.column(number).path for number in range(len(schema))]


def _describe_group(group: pq.RowGroupMetaData, columns: Mapping[str, int]) -> _RowGroup:
    steps, constants, are_bins_small, entries = _ANY_STEP, {}, False, 0
    for name, number in columns.items():
        column = group.column(number)
        entries = column.num_values if name == _BINS else entries
        limits = column.statistics
        if limits is None or not limits.has_min_max or limits.null_count:
            continue
        low, high = _check_limits(name, limits.min, limits.max)
        if name == "step":
            steps = low, high
        elif name == _BINS:
            are_bins_small = low >= 0 and high <= _LARGEST
        elif low == high:
            constants[name] = find_phase(low) if name == "phase" else low
    return _RowGroup(group.num_rows, steps, constants, are_bins_small, entries)


def _check_limits(name: str, low: Any, high: Any) -> tuple[Any, Any]:
    """The smallest and the largest value of a column, which somebody may have told of another kind.

    Raises:
        ValueError: they are.
    """
    if not fits(low, str if name == "phase" else int):
        raise ValueError(f"column {name!r} holds {low!r}")
    return low, high


def _read_bins(
    file: pq.ParquetFile, numbers: Sequence[int], are_small: bool
) -> tuple[npt.NDArray[np.int32], npt.NDArray[Any]]:
    batches = file.iter_batches(LIMITS.histograms_at_once, numbers, ["bins"], use_threads=False)
    return _unpack_bins((batch.column(0) for batch in batches), are_small)


def _unpack_bins(
    found: Iterable[pa.Array | pa.ChunkedArray], are_small: bool
) -> tuple[npt.NDArray[np.int32], npt.NDArray[Any]]:
    """Lengths and values of lists, in as few bytes as they need: there are many of them."""
    lengths, values = [np.empty(0, np.int32)], [np.empty(0, np.uint32)]
    for lists in (chunk for each in found for chunk in (each.chunks if isinstance(each, pa.ChunkedArray) else [each])):
        lengths.append(view_numbers(lists.value_lengths()))
        flat = view_numbers(lists.flatten())
        if flat.dtype.kind not in "iu":
            raise ValueError("'bins' has entries that are missing")
        values.append(flat.astype(np.uint32) if are_small else flat)
    counts = np.concatenate(lengths)
    if counts.dtype.kind != "i" or (counts < 0).any():  # lists that are missing have no length
        raise ValueError("'bins' has rows without a list")
    return counts, np.concatenate(values)


class StoredTensors:
    """Tensors that were kept whole, from all ranks.

    Args:
        folders: where the shards are, by rank.
        placements: by rank, what it holds, and so the names of its sites in the history.
        list_events: events; those that report an overwritten tensor stand for it.
        damages: shards that could not be read, which are passed over.
        tell: is notified of them.
    """

    def __init__(
        self,
        folders: Mapping[int, Path],
        placements: Mapping[int, Placements],
        list_events: Callable[[], Sequence[Event]],
        damages: Damages,
        tell: Callable[[Sequence[DamagedPart]], None],
    ) -> None:
        self._placements = placements
        self._damages, self._tell = damages, tell
        self._folders = folders
        self._list_events = list_events
        self._of_site: dict[str, list[Kept]] | None = None

    def find(self, site: str) -> list[Kept]:
        """The kept tensors of a site, by rising step; those of damaged shards are left out, with a warning.

        Raises:
            DamagedRunError: the system cannot read a shard now.
            RunUnreachableError: the store that they lie in does not answer.
        """
        if self._of_site is None:
            self._of_site = self._index()
        return self._of_site.get(site, [])

    def _index(self) -> dict[str, list[Kept]]:
        shards: list[Listed] = []
        listed = [kept for rank, folder in self._folders.items() for kept in self._list_folder(folder, rank, shards)]
        self._tell(self._damages.list_parts(shards, may_be_all=True))
        overwritten = (event for event in self._list_events() if event.kind == "overwritten")
        listed += [Kept(event.moment, event.name, lambda: None) for event in overwritten]
        index: dict[str, list[Kept]] = {}
        for kept in sorted(listed, key=lambda kept: (kept.step, kept.rank, kept.micro, kept.backward)):
            index.setdefault(kept.site, []).append(kept)
        return index

    def _list_folder(self, folder: Path, rank: int, shards: list[Listed]) -> Iterator[Kept]:
        """Tensors of a rank; ``shards`` takes its files."""
        rename = self._placements[rank].rename
        for _, path in list_shards(folder):
            key = path, number_file(path)
            named = self._damages.try_to(key, partial(_list_shard, path))
            steps = [moment.step for (moment, _), _, _ in named or ()]
            shards.append((key, path, (min(steps), max(steps)) if steps else None))
            for (moment, site), name, note in named or ():
                yield Kept(moment, rename(site), partial(_load, path, name, note), rank)


def _list_shard(path: Path) -> list[tuple[tuple[Moment, str], str, dict[str, Any]]]:
    """Of each tensor of a shard the moment and the site, its name and its note."""
    from retrograd.core.runs.shards import list_tensors, parse_name  # with torch, which takes seconds

    with _explain_damage(path):
        return [(parse_name(name), name, note) for name, note in list_tensors(path).items()]


def _load(path: Path, name: str, note: dict[str, Any]) -> torch.Tensor:
    from retrograd.core.runs.shards import read_tensor

    with _explain_damage(path):
        return unscale(read_tensor(path, name, note), note.get("scale", 1.0))


@contextlib.contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    try:
        with reaching(path):
            yield
    except RunUnreachableError:
        raise
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DamagedRunError(
            f"{str(path)!r} cannot be read: {error}",
            repair="move that file out of the folder to read the rest of the run.",
        ) from error
