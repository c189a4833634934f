"""Many steps in few columns, without losing extremes.

Consecutive recorded steps share a column. A column keeps the smallest, the mean and the largest of its
values, so that a spike of a single step stays visible however many steps are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepColumns:
    """Recorded steps that share columns.

    Attributes:
        steps: the recorded steps, ascending, int64 [n].
        width: how many of them share one column; the last column may hold fewer.
    """

    steps: IntArray
    width: int

    def __len__(self) -> int:
        return (len(self.steps) + self.width - 1) // self.width

    @property
    def first(self) -> IntArray:
        """First step of each column."""
        return self.steps[:: self.width]

    @property
    def last(self) -> IntArray:
        """Last step of each column."""
        ends = np.arange(1, len(self) + 1) * self.width - 1
        return self.steps[np.minimum(ends, len(self.steps) - 1)]

    def place(self, steps: IntArray) -> IntArray:
        """Column of each of the given steps; a step between two recorded ones goes to the earlier column."""
        return np.clip(np.searchsorted(self.first, steps, side="right") - 1, 0, max(len(self) - 1, 0))


@dataclass(frozen=True, slots=True)
class Bands:
    """The values that columns keep: each of shape (rows, columns), NaN where there is none."""

    low: FloatArray
    mean: FloatArray
    high: FloatArray


def share_columns(steps: IntArray, most: int) -> StepColumns:
    """Spread steps evenly over at most ``most`` columns; one step a column where they fit."""
    return StepColumns(steps, max(1, -(-len(steps) // most)))


def reduce_columns(values: FloatArray, width: int) -> Bands:
    """Smallest, mean and largest of every ``width`` consecutive values of a row; NaN are left out.

    Args:
        values: shape (rows, n).
        width: how many neighbours share a column.
    """
    if width == 1:
        return Bands(values, values, values)
    bands = ColumnBands(len(values), values.shape[1], width)
    bands.add(values, 0)
    return bands.bands


class ColumnBands:
    """Smallest, mean and largest of every ``width`` neighbours of a row, of which some are given after the other.

    Args:
        rows: how many rows.
        n: how many values a row will have.
        width: how many neighbours share a column.
    """

    def __init__(self, rows: int, n: int, width: int) -> None:
        self._width = width
        shape = rows, -(-n // width)
        self._low, self._high = np.full(shape, np.nan), np.full(shape, np.nan)
        self._total, self._counts = np.zeros(shape), np.zeros(shape, np.int64)

    def add(self, values: FloatArray, first: int) -> None:
        """Take in values of shape (rows, m), which are those from ``first`` on; NaN are left out."""
        rows, m = values.shape
        begin = first // self._width
        before = first - begin * self._width
        columns = -(-(before + m) // self._width)
        padded = np.full((rows, columns * self._width), np.nan)
        padded[:, before : before + m] = values
        cells = padded.reshape(rows, columns, self._width)
        known = ~np.isnan(cells)
        at = slice(begin, begin + columns)
        with np.errstate(invalid="ignore", over="ignore"):
            self._total[:, at] += np.where(known, cells, 0.0).sum(axis=2)
        self._counts[:, at] += known.sum(axis=2)
        self._low[:, at] = np.fmin(self._low[:, at], np.fmin.reduce(cells, axis=2))
        self._high[:, at] = np.fmax(self._high[:, at], np.fmax.reduce(cells, axis=2))

    def add_some(self, values: FloatArray, places: IntArray) -> None:
        """Take in values of shape (rows, m), which are those at some rising places; NaN are left out."""
        if not len(places):
            return
        first, n = int(places[0]), int(places[-1] - places[0]) + 1
        if n > len(places):
            spread = np.full((len(values), n), np.nan)
            spread[:, places - first] = values
            values = spread
        self.add(values, first)

    @property
    def bands(self) -> Bands:
        """What was given so far."""
        if self._width == 1:
            return Bands(self._low, self._low, self._low)
        with np.errstate(invalid="ignore"):
            mean = np.where(self._counts > 0, self._total / np.maximum(self._counts, 1), np.nan)
        return Bands(self._low, mean, self._high)
