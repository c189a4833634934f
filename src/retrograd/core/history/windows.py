"""Rows of a record that is longer than memory: read once, in order, merged and laid out for some steps at a time.

What is held is a table with a cell for each site and step, and a piece of the rows of one rank. A piece is merged into
the cells that it belongs to; so memory grows neither with ranks nor with steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.core.history.ahead import FAR_READERS, NEAR_READERS, read_ahead
from retrograd.core.history.arrays import give_back
from retrograd.core.history.cells import MOMENT, Cells, MergedTable, Placing, cell_of, number_moments
from retrograd.core.history.copies import COMPARED, Copies, CopyWatch, Disagreement
from retrograd.core.history.histograms import Histograms
from retrograd.core.history.outline import Outliner, RecordOutline
from retrograd.core.history.passes import FirstPasses
from retrograd.core.history.rows import (
    CALLS_OF,
    ROW_TYPES,
    Part,
    Rows,
    StoredPart,
    concatenate_columns,
    encode_phase,
    pick_columns,
)
from retrograd.core.limits import LIMITS
from retrograd.core.notices import tell_far, tell_read
from retrograd.core.statistics.row import BINS

IntArray = npt.NDArray[np.int64]


def find_outline(rows: Rows) -> RecordOutline:
    """Read what an outline tells."""
    outliner = Outliner(int(rows.codes.max(initial=-1)) + 1)
    for piece in rows.pieces(("step", "phase", "site", "order")):
        outliner.add(piece)
    return outliner.finish()


class LongRows(Rows):
    """All rows of a stored record that is too long to hold columns of all of them, though asking for one still does.

    Attributes:
        compared: sites whose copies differ, once all copies have been compared while rows were merged.
    """

    compared: list[Disagreement] | None = None

    def read(self, name: str) -> npt.NDArray[Any]:
        """See Rows; the result is not cached."""
        return self[name] if name in self._loaded else self._load(name)

    def hold(
        self, codes: Iterable[int], names: Sequence[str], first: int | None = None, last: int | None = None
    ) -> Part:
        """See Rows; they are read in one pass."""
        low, high = (_ANY_STEP[0] if first is None else first), (_ANY_STEP[1] if last is None else last)
        wanted = np.array(sorted(codes), np.int64)
        is_wanted = np.zeros(int(self.codes.max(initial=-1)) + 1, np.bool_)
        is_wanted[wanted] = True
        columns, left_out = list(dict.fromkeys((*names, "site", "step"))), -1
        while left_out != self.left_out:  # of a part that turned out to be damaged nothing is held
            left_out = self.left_out
            picked = [
                pick_columns(piece, is_wanted[piece["site"]] & (low <= piece["step"]) & (piece["step"] <= high))
                for piece in self.pieces(columns, first, last, wanted)
            ]
        return {name: concatenate_columns(picked, name) for name in names}

    def only(self, codes: Iterable[int]) -> Rows:
        """The rows of some sites, read in one pass."""
        return Rows([self.hold(codes, list(self))], None, self.merges, self.copies)

    def spans(self, most: int) -> Iterator[tuple[int, int]]:
        """See Rows; they end where pieces do, so that few of these are read twice."""
        steps = self.outline.all_steps
        width = max(most * len(steps) // self.count, 1)
        yield from ((int(some[0]), int(some[-1])) for some in _cut(steps, width, self.ends, 2 * width) if len(some))

    def merged(self, phase: str | None, codes: Iterable[int], names: Iterable[str] | None = None) -> Iterator[Rows]:
        """Rows with micro-batches and ranks merged, a row a site and step; all at once where these are not too many."""
        code, steps = None if phase is None else encode_phase(phase), self.steps_of(phase)
        if not self.fits(phase):
            wanted = np.intersect1d(self.codes, np.array(sorted(codes), np.int64))
            yield from merge_windows(self, Cells(steps, wanted, code), names)
            return
        if phase not in self._merged:
            self._merged[phase] = merge_window(self, Cells(steps, self.codes, code))
        yield self._merged[phase]

    def steps_of(self, phase: str | None) -> IntArray:
        """Steps that have rows of a phase, rising; of all phases for None."""
        return self.outline.all_steps if phase is None else self.outline.steps.get(encode_phase(phase), _NO_STEPS)

    def fits(self, phase: str | None) -> bool:
        """Return whether the rows of a phase are held once they are merged; else they are read whenever asked for."""
        return len(self.steps_of(phase)) * len(self.codes) <= LIMITS.merged_cells

    def add_exponents(
        self, codes: Sequence[Iterable[int]], phase: str, place: Callable[[IntArray], IntArray], columns: int
    ) -> Iterator[npt.NDArray[np.int64]]:
        """Exponent histograms of some sites, each with the codes of its calls: for each shape ``[columns, 255]``."""
        wanted = np.intersect1d(self.codes, np.array([code for several in codes for code in several], np.int64))
        steps = self.steps_of(phase)
        width = max(LIMITS.merged_cells // max(len(wanted), 1), 1)
        left_out = -1
        while left_out != self.left_out:  # of a part that turned out to be damaged nothing is added
            left_out, found = self.left_out, Histograms(len(wanted), columns)
            for some in _cut(steps, width, self.ends):
                window = Cells(some, wanted, encode_phase(phase))
                column_of = place(window.steps)
                for piece, cells in read_counted(self, ("first_bin", "bins"), window):
                    step, site = np.divmod(cells, len(wanted))
                    found.add(piece, site * columns + column_of[step])
                    del piece
        for several in codes:
            places = np.searchsorted(wanted, [code for code in several if code in wanted])
            yield sum(map(found.of_site, places), np.zeros((columns, BINS), np.int64))

    def pieces(
        self,
        names: Sequence[str],
        first: int | None = None,
        last: int | None = None,
        codes: npt.NDArray[np.integer] | None = None,
    ) -> Iterator[Part]:
        """See Rows; one piece has one rank, and ranks rise."""
        low, high = (_ANY_STEP[0] if first is None else first), (_ANY_STEP[1] if last is None else last)
        parts = self._list_parts(low, high)
        return self._read(read for part in parts for read in _plan(part, names, first, last, codes))

    def _list_parts(self, first: int, last: int) -> Iterator[StoredPart]:
        """Parts that may have steps between these, and how far it is."""
        for number, part in enumerate(self._stored, 1):
            if part.step_limits[0] <= last and part.step_limits[1] >= first:
                tell_far(part=f"{number:,} of {len(self._stored):,}")
                yield part

    def nonfinite_pieces(self, names: Sequence[str]) -> Iterator[Part]:
        """As :meth:`pieces`, without those of which all elements are known to be finite."""
        return self._read(read for part in self._stored for read in _plan(part, names, nonfinite=True))

    def _read(self, calls: Iterable[Callable[[], Part]]) -> Iterator[Part]:
        for piece in read_ahead(calls, FAR_READERS if any(part.is_far for part in self._stored) else NEAR_READERS):
            tell_read(len(next(iter(piece.values()), ())))
            yield piece
            del piece
        give_back()

    def in_pieces(self) -> Iterator[Part]:
        """All rows, piece by piece."""
        return self.pieces(list(self))

    @property
    def step_limits(self) -> tuple[int, int] | None:
        """The first and the last step."""
        return min(part.step_limits[0] for part in self._stored), max(part.step_limits[1] for part in self._stored)

    @cached_property
    def outline(self) -> RecordOutline:
        """Steps by phase, and the order of sites, as parts tell them."""
        outliner = Outliner(int(self.codes.max(initial=-1)) + 1)
        for part in self._stored:
            outliner.add_orders(part.codes, part.orders)
            for phase, runs in part.step_runs.items():
                outliner.add_runs(phase, runs)
        return outliner.finish()

    @cached_property
    def ends(self) -> IntArray:
        """The last steps of the pieces of the first rank, rising."""
        first = self._stored[0].rank if self._stored else 0
        return np.unique([end for part in self._stored if part.rank == first for end in part.ends]).astype(np.int64)

    @cached_property
    def _stored(self) -> list[StoredPart]:
        stored = [part for part in self.parts if isinstance(part, StoredPart) and part.count]
        return sorted(stored, key=lambda part: part.rank)

    @cached_property
    def _merged(self) -> dict[str | None, Rows]:
        return {}


class MergedRows(Rows):
    """The rows of a table that was merged: a row a site and step, by rising step."""

    def by_steps(self, most: int) -> Iterator[Rows]:
        """See Rows."""
        [columns], steps, start = self.parts, self["step"], 0
        while start + most < len(steps):
            first, next_one = steps[start], steps[start + most]  # all rows of a step stay together
            end = int(np.searchsorted(steps, next_one, "right" if first == next_one else "left"))
            yield MergedRows([{name: column[start:end] for name, column in columns.items()}], merges=self.merges)
            start = end
        rest = {name: column[start:] for name, column in columns.items()}
        yield MergedRows([rest], merges=self.merges) if start else self


def choose_rows(parts: Sequence[Part], earlier: Rows, merges: Mapping[str, str], copies: Copies | None) -> Rows:
    """All rows of a record that is stored in parts."""
    count = sum(part.count if isinstance(part, StoredPart) else 0 for part in parts)
    return (LongRows if count > LIMITS.held_rows else Rows)(parts, earlier, merges, copies)


_NO_STEPS = np.empty(0, np.int64)
_ANY_STEP = int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max)


def _plan(
    part: StoredPart,
    names: Sequence[str],
    first: int | None = None,
    last: int | None = None,
    codes: npt.NDArray[np.integer] | None = None,
    *,
    nonfinite: bool = False,
) -> Iterator[Callable[[], Part]]:
    """As the part plans it; a user's statistic that it lacks is NaN."""
    missing = [name for name in names if name not in part]
    for read in part.plan([name for name in names if name in part], first, last, codes, nonfinite=nonfinite):
        yield partial(_add_missing, read, missing) if missing else read


def _add_missing(read: Callable[[], Part], missing: Sequence[str]) -> Part:
    columns = read()
    return {**columns, **{name: np.full(len(columns["site"]), np.nan) for name in missing}}


# ---- merging ----


def read_counted(rows: LongRows, names: Sequence[str], cells: Cells) -> Iterator[tuple[Part, IntArray]]:
    """Pieces of the rows of a table without copies of others, and their cells; warn of copies that differ."""
    if not len(cells.steps) or not len(cells.codes):
        return
    needed = list(dict.fromkeys((*MOMENT, *names, *(("bin_count",) if "bins" in names else ()), "rank")))
    watch = None if rows.copies is None else CopyWatch(rows.copies)
    yield from read_once(rows, needed, cells, watch, FirstPasses())
    if watch is not None and rows.copies is not None:
        watch.settle()
        found = list_different(watch, rows.copies, cells)
        rows.copies.tell(found)
        is_whole = len(cells.codes) == len(rows.codes) and len(cells.steps) == len(rows.outline.all_steps)
        if is_whole and not watch.left_out and set(COMPARED).issubset(needed):
            rows.compared = found


def read_once(
    rows: LongRows, columns: Sequence[str], cells: Placing, watch: CopyWatch | None, passes: FirstPasses | None = None
) -> Iterator[tuple[Part, IntArray]]:
    """Pieces of the rows of a table without copies of others, and their cells.

    Args:
        rows: of the record.
        columns: what is read of them: at least the moment and the rank.
        cells: the table.
        watch: tells copies; None where there are none.
        passes: chooses among backward passes; None for all of them.
    """
    for each in rows.pieces(columns, int(cells.steps[0]), int(cells.steps[-1]), cells.codes):
        mask, numbers = cells.place(each)
        if passes is not None:
            first = passes.choose(each)
            if not first.all():
                mask, numbers = mask & first, numbers[first[mask]]
        piece = pick_columns(each, mask)
        if watch is not None:
            watch.left_out += len(mask) - len(numbers)
        if watch is not None and len(numbers):
            counts = watch.count(int(piece["rank"][0]), cells.number(watch.copies.align(piece), numbers), piece)
            piece, numbers = pick_columns(piece, counts), numbers[counts]
        if len(numbers):
            yield piece, numbers
        del each, piece  # they go before the next ones are read


def list_different(watch: CopyWatch, copies: Copies, cells: Cells) -> list[Disagreement]:
    """For each site of a table the first moment at which copies differ."""
    found: dict[int, Disagreement] = {}
    for moment, (shown, other) in sorted(watch.different.items()):
        step, site = divmod(cell_of(moment), len(cells.codes))
        code = int(cells.codes[site])
        found.setdefault(code, Disagreement(copies.name(code), int(cells.steps[step]), shown, other))
    return list(found.values())


def merge_windows(rows: LongRows, cells: Cells, names: Iterable[str] | None = None) -> Iterator[Rows]:
    """As :func:`merge_window`, of some steps after the other."""
    sites = max(len(cells.codes), 1)
    width = max(min(LIMITS.cells_at_once, LIMITS.merged_cells) // sites, 1)
    for some in _cut(cells.steps, width, rows.ends, LIMITS.merged_cells // sites):
        yield merge_window(rows, cells._replace(steps=some), names)


def _cut(steps: IntArray, width: int, ends: IntArray, most: int = 0) -> Iterator[IntArray]:
    """Some of the steps after the other, ``width`` at most, cut where a piece ends if there is such a place.

    A piece that has steps on both sides of a cut is read twice; rather than that ``most`` steps may be taken.
    """
    start = 0
    while start + width < len(steps):
        place = int(np.searchsorted(ends, steps[start + width]))  # the first piece that does not end before
        found = [int(np.searchsorted(steps, end, "right")) for end in ends[max(place - 1, 0) : place + 1]]
        end = next((each for each in found if start < each <= start + max(width, most)), start + width)
        yield steps[start:end]
        start = end
    yield steps[start:]


def merge_window(rows: LongRows, cells: Cells, names: Iterable[str] | None = None) -> Rows:
    """The rows of a table with micro-batches and ranks merged: a row a cell, by rising step."""
    all_names = (*ROW_TYPES, *rows.custom)
    wanted = set(all_names if names is None or rows.copies is not None else names)  # copies are compared in all of them
    columns = [name for name in all_names if name in wanted]
    columns += [CALLS_OF + name for name in columns if CALLS_OF + name in rows]
    left_out = -1
    while left_out != rows.left_out:  # of a part that turned out to be damaged nothing is merged
        left_out, table = rows.left_out, MergedTable(rows, len(cells.steps) * len(cells.codes), columns)
        for piece, numbers in read_counted(rows, columns, cells):
            table.add(piece, numbers)
            del piece
    return MergedRows([table.lay_out(cells)], merges=rows.merges)


def compare_copies(rows: LongRows) -> list[Disagreement]:
    """For each site the first step at which copies on several ranks differ, in any phase and pass."""
    if rows.compared is not None:
        return rows.compared
    found: dict[str, Disagreement] = {}
    width = max(LIMITS.merged_cells // max(len(rows.codes), 1), 1)
    steps = rows.outline.all_steps
    copies = rows.copies
    if copies is None:
        return []
    for start in range(0, len(steps), width):
        cells = Cells(steps[start : start + width], rows.codes, None)
        watch = CopyWatch(copies)
        for piece in rows.pieces((*MOMENT, *COMPARED, "rank"), int(cells.steps[0]), int(cells.steps[-1])):
            mask, numbers = cells.place(piece)
            picked = pick_columns(piece, mask)
            if len(numbers):
                watch.count(int(picked["rank"][0]), number_moments(copies.align(picked), numbers), picked)
        watch.settle()
        for each in list_different(watch, copies, cells):
            found.setdefault(each.site, each)
    return list(found.values())
