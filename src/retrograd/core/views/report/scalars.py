"""Scalars of a history for the strip above the map: what is drawn in one chart, and their numbers in columns."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from retrograd.core.history.arrays import read_numbers
from retrograd.core.history.curve import Curve
from retrograd.core.history.events import OF_EACH_STEP
from retrograd.core.history.history import History
from retrograd.core.history.scalar_names import EVAL_LOSS, GRAD_NORM, GRAD_NORM_CLIPPED, LOSS, LR, SCALE, UPDATE_RATIO
from retrograd.core.views.downsample import FloatArray, StepColumns
from retrograd.core.views.page.frame import pack_floats
from retrograd.core.views.report.blocks import ALL_BANDS, Block
from retrograd.core.views.report.scope import Scope

_LOGARITHMIC = frozenset({LOSS, EVAL_LOSS, GRAD_NORM, GRAD_NORM_CLIPPED, UPDATE_RATIO})
_SET = frozenset({LR, SCALE, "epoch"})
"""Not measured, so never smoothed."""

_RELATIVE = re.compile(r"^eval_|_clipped$|(\[[^\]]*\])+$")
"""What the name of a scalar has beyond that of the one with which it shares a chart."""


class ScalarCurves:
    """The scalars of a history as they are drawn, read once: 16 bytes a number.

    Args:
        history: of what.

    Attributes:
        curves: by name.
        facts: what the page must know of them, which it numbers in this order, the clock last; None for none.
    """

    def __init__(self, history: History) -> None:
        scalars = history.scalars
        self.curves = dict(scalars)
        self.facts: dict[str, Any] | None = None
        self._clock = _read_clock(history)
        if not self.curves:
            return
        listed = []
        for name in self.curves:
            chart, info = _RELATIVE.sub("", name) or name, scalars.about(name)
            about, _, taken = info.about.partition("; at ")
            scale, kinds = "log" if name in _LOGARITHMIC else "linear", {"exact": chart in _SET, "unit": info.unit}
            listed.append({"name": name, "chart": chart, "scale": scale, **kinds, "about": about, "taken": taken})
        self.facts = {"bands": ALL_BANDS, "series": list(range(len(listed) + 1)), "listed": listed}

    def reduce(self, names: list[str], columns: StepColumns, first: int | None = None) -> FloatArray:
        """Smallest, mean and largest of each column.

        Args:
            names: of scalars; of one that is not there all numbers are missing.
            columns: where.
            first: the step at which those begin that are drawn; by default all are.

        Returns:
            Shape (3, names + 1, columns); the last series is the clock.
        """
        missing = np.full((3, len(columns)), np.nan)
        curves = [*(self.curves.get(name, _NONE) for name in names), self._clock]
        found = [reduce_curve(_cut(curve, first), columns) for curve in curves]
        return np.stack([missing if numbers is None else numbers for numbers in found], axis=1)


_NONE = Curve(np.empty(0, np.int64), np.empty(0))


def _cut(curve: Curve, first: int | None) -> Curve:
    begin = 0 if first is None else int(np.searchsorted(curve.steps, first))
    return Curve(curve.steps[begin:], curve.values[begin:])


def make_scalar_block(scope: Scope) -> Block | None:
    """All scalars of a history; None where it has none."""
    known = ScalarCurves(scope.history)
    if known.facts is None or not len(scope.columns):
        return None
    return Block("scalars", known.facts, pack_floats(known.reduce(list(known.curves), scope.columns)))


def _read_clock(history: History) -> Curve:
    """Seconds from the first event to the first of each step, of those of which the time is known."""
    begin = (history.all_events.times or (0.0, 0.0))[0]
    steps, times = [np.empty(0, np.int64)], [np.empty(0)]
    for piece in history.all_events.pieces(["step", "time"], OF_EACH_STEP):
        step, time = read_numbers(piece["step"]), read_numbers(piece["time"])
        steps.append(step[time > 0])
        times.append(time[time > 0] - begin)
    unique, first = np.unique(np.concatenate(steps), return_index=True)
    return Curve(unique, np.concatenate(times)[first])


_AT_ONCE = 1 << 16


def reduce_curve(curve: Curve, columns: StepColumns) -> FloatArray | None:
    """Smallest, mean and largest of each column, shape (3, columns); None where there is none.

    Several numbers of one step, or of steps that were not recorded, share a column. The mean is of the finite ones, and
    infinite where there were numbers and none was finite; the smallest is NaN where all of them were NaN.
    """
    steps, values = curve
    if len(values) == 0 or len(columns) == 0:
        return None
    low, high = np.full(len(columns), np.nan), np.full(len(columns), np.nan)
    broken, count = np.zeros(len(columns), np.bool_), np.zeros(len(columns), np.int64)
    total = np.zeros(len(columns))
    for start in range(0, len(steps), _AT_ONCE):
        some = values[start : start + _AT_ONCE]
        place, known = columns.place(steps[start : start + _AT_ONCE]), np.isfinite(some)
        np.fmin.at(low, place, some)
        np.fmax.at(high, place, some)
        broken[place[~known]] = True
        with np.errstate(over="ignore"):
            np.add.at(total, place[known], some[known])
        count += np.bincount(place[known], minlength=len(columns))
    mean = np.where(count > 0, total / np.maximum(count, 1), np.where(broken, np.inf, np.nan))
    return np.stack([low, mean, high])
