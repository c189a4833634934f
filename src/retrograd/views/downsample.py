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
    rows, n = values.shape
    columns = -(-n // width)
    if width == 1 or n == 0:
        return Bands(values, values, values)
    padded = np.full((rows, columns * width), np.nan)
    padded[:, :n] = values
    cells = padded.reshape(rows, columns, width)
    known = ~np.isnan(cells)
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.where(known, cells, 0.0).sum(axis=2)
        counts = known.sum(axis=2)
        mean = np.where(counts > 0, total / np.maximum(counts, 1), np.nan)
    return Bands(np.fmin.reduce(cells, axis=2), mean, np.fmax.reduce(cells, axis=2))
