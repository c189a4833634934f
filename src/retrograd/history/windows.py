"""Rows of a record that is longer than memory: read once, in order, merged and laid out for some steps at a time.

What is held is a table with a cell for each site and step, and a piece of the rows of one rank. A piece is merged into
the cells that it belongs to; so memory grows neither with ranks nor with steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from retrograd.history.copies import COMPARED, Copies, CopyWatch, Disagreement
from retrograd.history.rows import (
    FIXED_TYPES,
    ROW_TYPES,
    Columns,
    Part,
    Rows,
    StoredPart,
    encode_phase,
    merge_custom,
    pick_columns,
)
from retrograd.statistics.row import BINS, EMPTY_ROW, merge_into, merge_rows

IntArray = npt.NDArray[np.int64]

MOST_CELLS = 1 << 19
"""Sites times steps that are merged at one time; a cell takes some 120 bytes."""

MOST_ROWS = 1 << 20
"""Rows of a stored record of which whole columns are held; of a longer one some steps are read at a time."""

MOMENT = ("step", "micro", "backward", "phase", "site")
"""Columns that tell the cell of a row."""


@dataclass(frozen=True, slots=True)
class RecordOutline:
    """What can be told of a record without its numbers.

    Attributes:
        steps: for each phase, by its code, the steps that have rows, rising.
        orders: for each site, by its code, the lowest number of its order; the largest integer where it is not known.
    """

    steps: dict[int, IntArray]
    orders: IntArray

    @property
    def all_steps(self) -> IntArray:
        """Steps that have rows of any phase, rising."""
        return _unite(list(self.steps.values()))


def find_outline(rows: Rows) -> RecordOutline:
    """Read what an outline tells."""
    orders = np.full(int(rows.codes.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    found: dict[int, list[IntArray]] = {}
    for piece in rows.pieces(("step", "phase", "site", "order")):
        order = np.where(piece["order"] < 0, np.iinfo(np.int64).max, piece["order"])
        np.minimum.at(orders, piece["site"], order)
        for phase in np.unique(piece["phase"]).tolist():
            listed = found.setdefault(phase, [])
            listed.append(np.unique(piece["step"][piece["phase"] == phase]).astype(np.int64))
            if len(listed) > 1 and sum(map(len, listed[1:])) > len(listed[0]) + MOST_CELLS:
                listed[:] = [_unite(listed)]
    return RecordOutline({phase: _unite(listed) for phase, listed in found.items()}, orders)


def _unite(listed: Sequence[IntArray]) -> IntArray:
    return np.unique(np.concatenate([np.empty(0, np.int64), *listed]))


class LongRows(Rows):
    """All rows of a stored record that is too long to hold columns of all of them, though asking for one still does.

    Attributes:
        compared: sites whose copies differ, once all copies have been compared while rows were merged.
    """

    compared: list[Disagreement] | None = None

    def only(self, codes: Iterable[int]) -> Rows:
        """The rows of some sites, read when they are asked for."""
        wanted = np.array(sorted(codes), np.int64)
        parts = [SomeSites(part, wanted) for part in self._stored]
        return Rows([part for part in parts if len(part.codes)], None, self.merges, self.copies)

    def merged(self, phase: str | None, codes: Iterable[int], names: Iterable[str] | None = None) -> Iterator[Rows]:
        """Rows with micro-batches and ranks merged, a row a site and step; all at once where these are not too many."""
        code = None if phase is None else encode_phase(phase)
        listed = self.outline.steps.values() if code is None else [self.outline.steps.get(code, _NO_STEPS)]
        steps = _unite(list(listed))
        if len(steps) * len(self.codes) > MOST_CELLS:
            wanted = np.intersect1d(self.codes, np.array(sorted(codes), np.int64))
            yield from merge_windows(self, Cells(steps, wanted, code), names)
            return
        if phase not in self._merged:
            [self._merged[phase]] = merge_windows(self, Cells(steps, self.codes, code))
        yield self._merged[phase]

    def add_exponents(
        self, codes: Sequence[Iterable[int]], phase: str, place: Callable[[IntArray], IntArray], columns: int
    ) -> Iterator[npt.NDArray[np.int64]]:
        """Exponent histograms of some sites, each with the codes of its calls: for each shape ``[columns, 255]``."""
        wanted = np.intersect1d(self.codes, np.array([code for several in codes for code in several], np.int64))
        steps = self.outline.steps.get(encode_phase(phase), _NO_STEPS)
        column_of, found = place(steps), Histograms(len(wanted), columns)
        width = max(MOST_CELLS // max(len(wanted), 1), 1)
        for start in range(0, len(steps), width):
            window = Cells(steps[start : start + width], wanted, encode_phase(phase))
            for piece, cells in read_counted(self, ("first_bin", "bins"), window):
                step, site = np.divmod(cells, len(wanted))
                found.add(piece, site * columns + column_of[start + step])
        for several in codes:
            places = np.searchsorted(wanted, [code for code in several if code in wanted])
            yield sum(map(found.of_site, places), np.zeros((columns, BINS), np.int64))

    def pieces(self, names: Sequence[str], first: int | None = None, last: int | None = None) -> Iterator[Part]:
        """Some columns of all rows, piece by piece; one piece has one rank, and ranks rise.

        Args:
            names: of the columns.
            first: the first step that is asked for.
            last: the last one; pieces that have no step between the two are left out.
        """
        return _read_ahead(read for part in self._stored for read in _plan(part, names, first, last))

    def in_pieces(self) -> Iterator[Part]:
        """All rows, piece by piece."""
        return self.pieces(list(self))

    @property
    def step_limits(self) -> tuple[int, int] | None:
        """The first and the last step."""
        return min(part.step_limits[0] for part in self._stored), max(part.step_limits[1] for part in self._stored)

    @cached_property
    def outline(self) -> RecordOutline:
        """Steps by phase, and the order of sites."""
        return find_outline(self)

    @cached_property
    def _stored(self) -> list[StoredPart]:
        stored = [part for part in self.parts if isinstance(part, StoredPart) and part.count]
        return sorted(stored, key=lambda part: part.rank)

    @cached_property
    def _merged(self) -> dict[str | None, Rows]:
        return {}


def choose_rows(parts: Sequence[Part], earlier: Rows, merges: Mapping[str, str], copies: Copies | None) -> Rows:
    """All rows of a record that is stored in parts."""
    count = sum(part.count if isinstance(part, StoredPart) else 0 for part in parts)
    return (LongRows if count > MOST_ROWS else Rows)(parts, earlier, merges, copies)


_NO_STEPS = np.empty(0, np.int64)


class SomeSites(StoredPart):
    """The rows of some sites of a part.

    Args:
        part: of what.
        codes: of which sites.
    """

    def __init__(self, part: StoredPart, codes: npt.NDArray[np.int64]) -> None:
        self._part = part
        self._wanted = codes
        self.rank, self.step_limits = part.rank, part.step_limits
        self.codes = np.intersect1d(part.codes, codes).astype(np.int32)

    @property
    def count(self) -> int:  # type: ignore[override]  # it is known when they are read
        """Number of rows."""
        return len(self["site"])

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name not in self._part:
            raise KeyError(name)
        with_bins = ("bin_count", "bins") if name in ("bin_count", "bins") else (name,)
        pieces = [read()[name] for read in self.plan(with_bins)]
        return np.concatenate(pieces) if pieces else np.empty(0, FIXED_TYPES.get(name, np.float64))

    def __contains__(self, name: object) -> bool:
        return name in self._part

    def __iter__(self) -> Iterator[str]:
        return iter(self._part)

    def __len__(self) -> int:
        return len(self._part)

    def plan(
        self,
        names: Sequence[str],
        first: int | None = None,
        last: int | None = None,
        codes: npt.NDArray[np.int32] | None = None,
    ) -> Iterator[Callable[[], Part]]:
        """As of the part; what is read holds the rows of these sites alone."""
        codes = self.codes if codes is None else np.intersect1d(codes, self.codes)
        if len(codes):
            for read in self._part.plan(list(dict.fromkeys((*names, "site"))), first, last, codes):
                yield partial(self._read, read)

    def _read(self, read: Callable[[], Part]) -> Part:
        columns = read()
        return pick_columns(columns, np.isin(columns["site"], self.codes))


def _plan(part: StoredPart, names: Sequence[str], first: int | None, last: int | None) -> Iterator[Callable[[], Part]]:
    """As the part plans it; a user's statistic that it lacks is NaN."""
    missing = [name for name in names if name not in part]
    for read in part.plan([name for name in names if name in part], first, last):
        yield partial(_add_missing, read, missing) if missing else read


def _add_missing(read: Callable[[], Part], missing: Sequence[str]) -> Part:
    columns = read()
    return {**columns, **{name: np.full(len(columns["site"]), np.nan) for name in missing}}


_READERS = 2
"""Threads that read: pyarrow unpacks beside Python, which merges on one core. More would hold more, and wait."""


def _read_ahead(calls: Iterable[Callable[[], Part]]) -> Iterator[Part]:
    """What some calls return, in order; the next ones are made by other threads meanwhile."""
    with ThreadPoolExecutor(_READERS, "retrograd-reader") as readers:
        waiting: deque[Future[Part]] = deque()
        for call in calls:
            waiting.append(readers.submit(call))
            if len(waiting) > _READERS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


# ---- merging ----


class Cells(NamedTuple):
    """A part of a table of steps × sites; a cell's number is its step's place times the sites, plus its site's place.

    Attributes:
        steps: rising.
        codes: of the sites, rising.
        phase: code of the only phase; None for all.
    """

    steps: IntArray
    codes: IntArray
    phase: int | None

    def place(self, piece: Part) -> tuple[npt.NDArray[np.bool_], IntArray]:
        """Which rows belong to the table, of the first backward pass or none, and the cells of these."""
        step, site = locate(self.steps, piece["step"]), locate(self.codes, piece["site"])
        mask = (self.steps[step] == piece["step"]) & (self.codes[site] == piece["site"]) & (piece["backward"] <= 0)
        if self.phase is not None:
            mask &= piece["phase"] == self.phase
        cells = step * len(self.codes) + site
        return mask, cells if mask.all() else cells[mask]

    def number(self, piece: Part, cells: IntArray) -> IntArray:
        """A number for the site and the moment of each row, of which these are the cells."""
        return number_moments(piece, cells)


def locate(ordered: IntArray, wanted: npt.NDArray[Any]) -> IntArray:
    """Where each number is among rising ones, if it is there; numbers without gaps need no search."""
    if ordered[-1] - ordered[0] + 1 == len(ordered):
        return np.asarray(np.clip(wanted - ordered[0], 0, len(ordered) - 1), np.int64)
    return np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)


def read_counted(rows: LongRows, names: Sequence[str], cells: Cells) -> Iterator[tuple[Part, IntArray]]:
    """Pieces of the rows of a table without copies of others, and their cells; warn of copies that differ."""
    if not len(cells.steps) or not len(cells.codes):
        return
    needed = list(dict.fromkeys((*MOMENT, *names, *(("bin_count",) if "bins" in names else ()), "rank")))
    watch = None if rows.copies is None else CopyWatch(rows.copies)
    yield from read_once(rows, needed, cells, watch)
    if watch is not None and rows.copies is not None:
        watch.settle()
        found = list_different(watch, rows.copies, cells)
        rows.copies.tell(found)
        is_whole = len(cells.codes) == len(rows.codes) and len(cells.steps) == len(rows.outline.all_steps)
        if is_whole and not watch.left_out and set(COMPARED).issubset(needed):
            rows.compared = found


class Placing(Protocol):
    """A table of some steps that knows the cells of rows."""

    @property
    def steps(self) -> IntArray:
        """Rising."""

    def place(self, piece: Part) -> tuple[npt.NDArray[np.bool_], IntArray]:
        """Which rows belong to the table, and the cells of these."""

    def number(self, piece: Part, cells: IntArray) -> IntArray:
        """A number for the site and the moment of each row, of which these are the cells."""


def read_once(
    rows: LongRows, columns: Sequence[str], cells: Placing, watch: CopyWatch | None
) -> Iterator[tuple[Part, IntArray]]:
    """Pieces of the rows of a table without copies of others, and their cells.

    Args:
        rows: of the record.
        columns: what is read of them: at least the moment and the rank.
        cells: the table.
        watch: tells copies; None where there are none.
    """
    for each in rows.pieces(columns, int(cells.steps[0]), int(cells.steps[-1])):
        mask, numbers = cells.place(each)
        piece = pick_columns(each, mask)
        if watch is not None:
            watch.left_out += len(mask) - len(numbers)
        if watch is not None and len(numbers):
            counts = watch.count(int(piece["rank"][0]), cells.number(watch.copies.align(piece), numbers), piece)
            piece, numbers = pick_columns(piece, counts), numbers[counts]
        if len(numbers):
            yield piece, numbers


def list_different(watch: CopyWatch, copies: Copies, cells: Cells) -> list[Disagreement]:
    """For each site of a table the first moment at which copies differ."""
    found: dict[int, Disagreement] = {}
    for moment, (shown, other) in sorted(watch.different.items()):
        step, site = divmod(cell_of(moment), len(cells.codes))
        code = int(cells.codes[site])
        found.setdefault(code, Disagreement(copies.name(code), int(cells.steps[step]), shown, other))
    return list(found.values())


_CELL_BITS = 43  # 3 for the phase, 16 for the backward pass, 24 for the micro-batch


def number_moments(piece: Part, cells: IntArray) -> IntArray:
    """A number for the cell, phase, backward pass and micro-batch of each row."""
    phase, backward = piece["phase"].astype(np.int64), piece["backward"].astype(np.int64) + 1
    micro = np.minimum(piece["micro"].astype(np.int64), (1 << 24) - 1)
    return np.asarray(cells << _CELL_BITS | phase << 40 | backward << 24 | micro, np.int64)


def cell_of(moment: int) -> int:
    """The cell of a moment's number."""
    return moment >> _CELL_BITS


def split_moments(numbers: IntArray) -> Columns:
    """Columns of what else numbers of moments tell: phase, backward pass and micro-batch."""
    return {
        "phase": (numbers >> 40 & 0b111).astype(np.uint8),
        "backward": ((numbers >> 24 & 0xFFFF) - 1).astype(np.int16),
        "micro": (numbers & ((1 << 24) - 1)).astype(np.int32),
    }


def merge_windows(rows: LongRows, cells: Cells, names: Iterable[str] | None = None) -> Iterator[Rows]:
    """The rows of a table with micro-batches and ranks merged, some steps at a time: a row a cell, by rising step."""
    all_names = (*ROW_TYPES, *rows.custom)
    wanted = set(all_names if names is None or rows.copies is not None else names)  # copies are compared in all of them
    columns = [name for name in all_names if name in wanted]
    width = max(MOST_CELLS // max(len(cells.codes), 1), 1)
    for start in range(0, max(len(cells.steps), 1), width):
        window = cells._replace(steps=cells.steps[start : start + width])
        table = MergedTable(rows, len(window.steps) * len(window.codes), columns)
        for piece, numbers in read_counted(rows, columns, window):
            table.add(piece, numbers)
        yield Rows([table.lay_out(window)], merges=rows.merges)


class MergedTable:
    """Merged rows, one a cell.

    Args:
        rows: of which record.
        size: how many cells.
        names: the columns; all when left out.
    """

    def __init__(self, rows: Rows, size: int, names: Collection[str] | None = None) -> None:
        wanted = (*ROW_TYPES, *rows.custom) if names is None else names
        self._merges = {name: rows.merges.get(name, "mean") for name in rows.custom if name in wanted}
        self._columns: Columns = {name: np.zeros(size, kind) for name, kind in ROW_TYPES.items() if name in wanted}
        for name in EMPTY_ROW.keys() & self._columns:
            self._columns[name][:] = EMPTY_ROW[name]
        self._custom: Columns = {name: np.full(size, np.nan) for name in self._merges}
        self._weights: Columns = {name: np.zeros(size) for name in self._merges}
        self._is_filled = np.zeros(size, np.bool_)

    def add(self, piece: Part, cells: IntArray) -> None:
        """Merge rows into their cells."""
        low, high = int(cells.min()), int(cells.max()) + 1
        where: slice | IntArray
        if high - low <= 4 * len(cells):
            where, groups, size = slice(low, high), cells - low, high - low
        else:
            where, groups = np.unique(cells, return_inverse=True)
            size = len(where)
        if int(np.bincount(groups).max()) == 1:
            is_dense = size == len(cells) and bool((np.diff(cells) > 0).all())
            merge_into(self._columns, where if is_dense else cells, piece)
        else:
            merged = merge_rows({name: piece[name] for name in self._columns}, groups, size)
            has_rows = np.bincount(groups, minlength=size) > 0
            at = np.arange(low, high) if isinstance(where, slice) else where
            merge_into(self._columns, at[has_rows], {name: column[has_rows] for name, column in merged.items()})
        if self._merges:
            earlier = np.flatnonzero(self._is_filled[where])
            for name, how in self._merges.items():
                self._add_custom(name, how, piece, where, earlier, np.concatenate((earlier, groups)), size)
        self._is_filled[cells] = True

    def _add_custom(
        self, name: str, how: str, piece: Part, where: slice | IntArray, earlier: IntArray, groups: IntArray, size: int
    ) -> None:
        """Merge a user's statistic; its weights are the calls of rows that have it."""
        values = _join(self._custom[name][where][earlier], piece[name]) if len(earlier) else piece[name]
        calls = np.where(np.isnan(piece[name]), 0.0, piece["calls"])
        weights = _join(self._weights[name][where][earlier], calls) if len(earlier) else calls
        self._custom[name][where] = merge_custom(values, how, weights, groups, size)
        self._weights[name][where] = np.bincount(groups, weights, minlength=size)

    def take(self) -> tuple[IntArray, Columns]:
        """The cells that were filled, and their columns."""
        filled = np.flatnonzero(self._is_filled)
        found = {**self._columns, **self._custom}
        is_full = len(filled) == len(self._is_filled)
        return filled, found if is_full else {name: each[filled] for name, each in found.items()}

    def lay_out(self, cells: Cells) -> Columns:
        """All cells that were filled, as rows of one rank and micro-batch."""
        filled, columns = self.take()
        same = {"micro": 0, "backward": -1, "phase": cells.phase or 0, "rank": 0, "scale": 1.0, "first_bin": 0}
        for name, value in {**same, "bin_count": 0}.items():
            columns[name] = np.broadcast_to(np.array(value, FIXED_TYPES[name]), len(filled))
        columns["step"] = cells.steps[filled // len(cells.codes)]
        columns["site"] = cells.codes[filled % len(cells.codes)].astype(np.int32)
        columns["bins"] = np.empty(0, np.int64)
        return columns


def _join(earlier: npt.NDArray[Any], later: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.concatenate((earlier, later))


def compare_copies(rows: LongRows) -> list[Disagreement]:
    """For each site the first step at which copies on several ranks differ, in any phase and pass."""
    if rows.compared is not None:
        return rows.compared
    found: dict[str, Disagreement] = {}
    width = max(MOST_CELLS // max(len(rows.codes), 1), 1)
    steps = rows.outline.all_steps
    copies = rows.copies
    if copies is None:
        return []
    for start in range(0, len(steps), width):
        cells = Cells(steps[start : start + width], rows.codes, None)
        watch = CopyWatch(copies)
        for piece in rows.pieces((*MOMENT, *COMPARED, "rank"), int(cells.steps[0]), int(cells.steps[-1])):
            all_passes = {**piece, "backward": np.minimum(piece["backward"], 0)}
            mask, numbers = cells.place(all_passes)
            picked = pick_columns(piece, mask)
            if len(numbers):
                watch.count(int(picked["rank"][0]), number_moments(copies.align(picked), numbers), picked)
        watch.settle()
        for each in list_different(watch, copies, cells):
            found.setdefault(each.site, each)
    return list(found.values())


# ---- histograms ----


def add_columns(counts: npt.NDArray[np.int64], place: IntArray, columns: int) -> npt.NDArray[np.int64]:
    """Add up histograms that share a column.

    Args:
        counts: shape (n, bins): a histogram a step.
        place: the column of each step, ascending, shape (n,).
        columns: how many columns there are.

    Returns:
        Counts of shape (columns, bins).
    """
    added = np.zeros((columns, counts.shape[1]), dtype=np.int64)
    if len(place):
        starts = np.flatnonzero(np.diff(place, prepend=-1))
        added[place[starts]] = np.add.reduceat(counts, starts, axis=0)
    return added


_HISTOGRAMS_AT_ONCE = 1 << 13
"""While they are added, each takes some 500 bytes."""


class Histograms:
    """Histograms added up by site and column, of the bins that are used."""

    def __init__(self, sites: int, columns: int) -> None:
        self._first = 0
        self._counts = np.zeros((sites, columns, 0), np.int64)

    def add(self, rows: Part, cells: IntArray) -> None:
        """Add the histograms of rows; a cell is a site's place times the columns, plus a column."""
        lengths, first = rows["bin_count"].astype(np.int64), rows["first_bin"].astype(np.int64)
        used = lengths > 0
        if not used.any():
            return
        self._reach(int(first[used].min()), int((first + lengths)[used].max()))
        start = cells * self._counts.shape[2] + first - self._first
        ends = np.cumsum(lengths)
        counts, bins = self._counts.reshape(-1), rows["bins"]
        for low in range(0, len(cells), _HISTOGRAMS_AT_ONCE):
            some = slice(low, low + _HISTOGRAMS_AT_ONCE)
            skipped = int(ends[low] - lengths[low])
            n = int(lengths[some].sum())
            place = np.repeat(start[some] - (ends[some] - lengths[some]) + skipped, lengths[some]) + np.arange(n)
            np.add.at(counts, place, bins[skipped : skipped + n].astype(np.int64))

    def of_site(self, place: int) -> npt.NDArray[np.int64]:
        """Those of one site: shape ``[columns, 255]``."""
        counts = np.zeros((self._counts.shape[1], BINS), np.int64)
        counts[:, self._first : self._first + self._counts.shape[2]] = self._counts[place]
        return counts

    def list_stretches(
        self, cells: IntArray
    ) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Of some cells the first bin that is used, how many there are to the last one, and their counts."""
        counts = self._counts.reshape(-1, self._counts.shape[2])[cells]
        n = counts.shape[1]
        used = counts > 0
        has_any = used.any(axis=1)
        first = np.where(has_any, used.argmax(axis=1) if n else 0, 0)
        end = np.where(has_any, n - used[:, ::-1].argmax(axis=1) if n else 0, 0)
        within = (np.arange(n) >= first[:, None]) & (np.arange(n) < end[:, None])
        begins = np.where(has_any, first + self._first, 0)
        return begins.astype(np.int16), (end - first).astype(np.int32), counts[within]

    def _reach(self, first: int, end: int) -> None:
        """Make room for bins first … end − 1."""
        sites, columns, n = self._counts.shape
        if not (0 <= first <= end <= BINS):
            raise ValueError(f"bins {first} … {end - 1} are not among 0 … {BINS - 1}")
        if n and self._first <= first and end <= self._first + n:
            return
        low, high = (min(first, self._first), max(end, self._first + n)) if n else (first, end)
        wider = np.zeros((sites, columns, high - low), np.int64)
        wider[:, :, self._first - low : self._first - low + n] = self._counts
        self._first, self._counts = low, wider
