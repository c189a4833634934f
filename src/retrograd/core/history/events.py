"""All events of a record. Each step has losses and updates, which a long record leaves in its files; others are few."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from retrograd.core.history.arrays import read_numbers
from retrograd.core.history.cells import locate
from retrograd.core.history.curve import Curve
from retrograd.core.history.steps import number_steps
from retrograd.core.history.table import NO_EVENTS, OF_LOSSES, filter_rows, find_kinds, pick_losses

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

T = TypeVar("T", bound=np.generic)

OF_EACH_STEP = ("loss", "update", "scalar")
"""Kinds of which a step has at least one."""


class Events:
    """Events that are held.

    Args:
        table: as :data:`retrograd.core.history.table.EVENT_COLUMNS`.
    """

    def __init__(self, table: pa.Table = NO_EVENTS) -> None:
        self._table = table

    @property
    def table(self) -> pa.Table:
        """All of them, in the order recorded."""
        return self._table

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self.table.num_rows)

    @property
    def few(self) -> pa.Table:
        """Those of which not each step has one: neither losses nor updates."""
        return filter_rows(self.table, ~find_kinds(self.table, OF_EACH_STEP))

    @property
    def loss(self) -> Curve:
        """The loss of each step: the mean of all scalars from which backward started."""
        sums = LossSums()
        sums.add(read_losses(self.table))
        return sums.finish()

    @property
    def times(self) -> tuple[float, float] | None:
        """Seconds since the epoch of the first and the last of which these are known."""
        return find_times(self.table)

    def pieces(self, names: Sequence[str], kinds: Collection[str]) -> Iterator[pa.Table]:
        """Columns of the events of some kinds, one piece after the other, in the order recorded."""
        yield pick_kinds(self.table, names, kinds)

    def losses_at(self, steps: Collection[int]) -> pa.Table:
        """The losses of some steps."""
        return pick_losses(self.table, steps)

    def last(self, n: int) -> pa.Table:
        """The last ones, so many at most."""
        return self.table.slice(max(self.table.num_rows - n, 0))

    def since(self, step: int) -> Events:
        """Those of this step and later ones."""
        return Events(filter_rows(self.table, read_numbers(self.table["step"]) >= step))


def pick_kinds(table: pa.Table, names: Sequence[str], kinds: Collection[str]) -> pa.Table:
    """Columns of the events of some kinds."""
    return filter_rows(table, find_kinds(table, kinds)).select(list(names))


def find_times(table: pa.Table) -> tuple[float, float] | None:
    """The first and the last moment of which the time is known; None where none is."""
    times = read_numbers(table["time"])
    known = times[times > 0]
    return (float(known.min()), float(known.max())) if len(known) else None


# ---- losses ----


class Losses(NamedTuple):
    """Losses in the order recorded.

    Attributes:
        steps: int64, shape ``[n]``.
        values: float64, shape ``[n]``.
    """

    steps: IntArray
    values: FloatArray

    def last(self, end: int | None = None) -> int | None:
        """The last step that has one, of those up to ``end``."""
        steps = self.steps if end is None else self.steps[self.steps <= end]
        return int(steps.max()) if len(steps) else None

    def since(self, step: int) -> Losses:
        """Those of this step and later ones."""
        mask = self.steps >= step
        if mask.all():
            return self
        return Losses(self.steps[mask], self.values[mask])


def read_losses(table: pa.Table) -> Losses:
    """The losses among events."""
    losses = pick_losses(table.select(OF_LOSSES))
    return Losses(read_numbers(losses["step"]), read_numbers(losses["value"]))


class LossSums:
    """Losses of each step, added up in the order in which they are given: 24 bytes a step."""

    def __init__(self) -> None:
        self._count = 0
        self._steps, self._totals, self._counts = np.empty(0, np.int64), np.empty(0), np.empty(0)
        """Of a rising list of steps; behind the first so many there is room for more of them."""

    def add(self, losses: Losses) -> None:
        """Add losses."""
        if not len(losses.steps):
            return
        self._reach(losses.steps)
        place = locate(self._steps[: self._count], losses.steps)
        with np.errstate(invalid="ignore", over="ignore"):  # losses may be infinite
            np.add.at(self._totals, place, losses.values)
        np.add.at(self._counts, place, 1.0)

    def cut(self, step: int) -> None:
        """Forget this step and later ones."""
        self._count = int(np.searchsorted(self._steps[: self._count], step))

    @property
    def curve(self) -> Curve:
        """The mean of each step."""
        n = self._count
        return Curve(self._steps[:n].copy(), self._totals[:n] / self._counts[:n])

    def finish(self) -> Curve:
        """The mean of each step, where nothing will be added any more: in the memory of these sums."""
        n = self._count
        return Curve(self._steps[:n], np.divide(self._totals[:n], self._counts[:n], out=self._totals[:n]))

    def _reach(self, steps: IntArray) -> None:
        """Have a place for these steps."""
        known = self._steps[: self._count]
        if len(known):
            steps = steps[known[locate(known, steps)] != steps]
        if not len(steps):
            return
        new, _ = number_steps(steps)
        start, self._count = self._count, self._count + len(new)
        if not start or new[0] > known[-1]:  # they mostly come in their order
            self._make_room()
            self._steps[start : self._count], self._totals[start : self._count] = new, 0.0
            self._counts[start : self._count] = 0.0
        else:
            before = np.searchsorted(known, new)
            self._steps = np.insert(known, before, new)
            self._totals = np.insert(self._totals[:start], before, 0.0)
            self._counts = np.insert(self._counts[:start], before, 0.0)

    def _make_room(self) -> None:
        """Have place for all steps; what is not written to yet takes no memory."""
        if self._count > len(self._steps):
            self._steps = _grow(self._steps, 2 * self._count)
            self._totals, self._counts = _grow(self._totals, 2 * self._count), _grow(self._counts, 2 * self._count)


def _grow(column: npt.NDArray[T], size: int) -> npt.NDArray[T]:
    larger = np.empty(size, column.dtype)
    larger[: len(column)] = column
    return larger
