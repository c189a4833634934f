"""All events of a record. Each step has losses and updates, which a long record leaves in its files; others are few."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from retrograd.history.arrays import read_numbers
from retrograd.history.cells import locate
from retrograd.history.matrix import Curve
from retrograd.history.steps import number_steps
from retrograd.history.table import NO_EVENTS, OF_LOSSES, filter_rows, find_kinds, pick_losses, weigh_losses

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

OF_EACH_STEP = ("loss", "update")
"""Kinds of which a step has at least one."""


class Events:
    """Events that are held.

    Args:
        table: as :data:`retrograd.history.table.EVENT_COLUMNS`.
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
        return sums.curve

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
        weights: of how many ranks each is the mean; None where all are of one.
    """

    steps: IntArray
    values: FloatArray
    weights: FloatArray | None

    def since(self, step: int) -> Losses:
        """Those of this step and later ones."""
        mask = self.steps >= step
        if mask.all():
            return self
        return Losses(self.steps[mask], self.values[mask], None if self.weights is None else self.weights[mask])


def read_losses(table: pa.Table) -> Losses:
    """The losses among events."""
    losses = pick_losses(table.select(OF_LOSSES))
    return Losses(read_numbers(losses["step"]), read_numbers(losses["value"]), weigh_losses(losses["text"]))


@dataclass(slots=True)
class _Columns:
    """For each step of a rising list the sum of its losses and of their weights."""

    steps: IntArray
    totals: FloatArray
    weights: FloatArray


class LossSums:
    """Losses of each step, added up in the order in which they are given."""

    def __init__(self) -> None:
        self._known = _Columns(np.empty(0, np.int64), np.empty(0), np.empty(0))

    def add(self, losses: Losses) -> None:
        """Add losses."""
        if not len(losses.steps):
            return
        self._reach(losses.steps)
        known = self._known
        place = locate(known.steps, losses.steps)
        weights = 1.0 if losses.weights is None else losses.weights
        with np.errstate(invalid="ignore", over="ignore"):  # losses may be infinite
            np.add.at(known.totals, place, losses.values if losses.weights is None else weights * losses.values)
        np.add.at(known.weights, place, weights)

    def cut(self, step: int) -> None:
        """Forget this step and later ones."""
        end = int(np.searchsorted(self._known.steps, step))
        known = self._known
        self._known = _Columns(known.steps[:end].copy(), known.totals[:end].copy(), known.weights[:end].copy())

    @property
    def curve(self) -> Curve:
        """The mean of each step."""
        return Curve(self._known.steps, self._known.totals / self._known.weights)

    def _reach(self, steps: IntArray) -> None:
        """Have a place for these steps."""
        known = self._known
        if len(known.steps):
            steps = steps[known.steps[locate(known.steps, steps)] != steps]
            if not len(steps):
                return
        merged, _ = number_steps(np.concatenate((known.steps, steps)))
        place = locate(merged, known.steps)
        totals, weights = np.zeros(len(merged)), np.zeros(len(merged))
        totals[place], weights[place] = known.totals, known.weights
        self._known = _Columns(merged, totals, weights)
