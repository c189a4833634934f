"""Scalars of a history for the strip above the map: what is drawn in one chart, and their numbers in columns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from retrograd.core.history.arrays import read_numbers
from retrograd.core.history.events import OF_EACH_STEP
from retrograd.core.history.history import History
from retrograd.core.history.matrix import Curve
from retrograd.core.views.downsample import FloatArray, StepColumns
from retrograd.core.views.page.frame import pack_floats
from retrograd.core.views.report.blocks import ALL_BANDS, Block
from retrograd.core.views.report.scope import Scope

_UNITS = {"step_time": "s", "memory": "B"}
_LOGARITHMIC = frozenset({"loss", "eval_loss", "grad_norm", "grad_norm_clipped", "update_ratio"})
_SET = frozenset({"lr", "epoch", "scale"})
"""Not measured, so never smoothed."""

_RELATIVE = re.compile(r"^eval_|_clipped$|\[\d+\]$")
"""What the name of a scalar has beyond that of the one with which it shares a chart."""


def describe_scalars(names: Iterable[str]) -> dict[str, Any] | None:
    """What the page must know of scalars, which it numbers in this order, the clock last; None where there is none."""
    listed = list(names)
    if not listed:
        return None
    return {
        "bands": ALL_BANDS,
        "series": list(range(len(listed) + 1)),
        "listed": [
            {
                "name": name,
                "chart": chart,
                "unit": _UNITS.get(name, ""),
                "scale": "log" if name in _LOGARITHMIC else "linear",
                "exact": chart in _SET,
            }
            for name in listed
            for chart in [_RELATIVE.sub("", name) or name]
        ],
    }


def make_scalar_block(scope: Scope) -> Block | None:
    """All scalars of a history; None where it has none."""
    facts = describe_scalars(scope.history.scalars) if len(scope.columns) else None
    if facts is None:
        return None
    numbers = reduce_scalars(scope, list(scope.history.scalars), find_begin(scope.history))
    return Block("scalars", facts, pack_floats(numbers))


def find_begin(history: History) -> float:
    """Seconds since the epoch of the first event."""
    return (history.all_events.times or (0.0, 0.0))[0]


def reduce_scalars(scope: Scope, names: Sequence[str], begin: float) -> FloatArray:
    """Smallest, mean and largest of each column.

    Args:
        scope: whose columns.
        names: of scalars; of one that is not there all numbers are missing.
        begin: from when on the clock counts, in seconds since the epoch.

    Returns:
        Shape (3, names + 1, columns); the last series is the clock.
    """
    known = scope.history.scalars
    curves = [known.get(name) for name in names]
    curves.append(read_clock(scope.history, begin))
    missing = np.full((3, len(scope.columns)), np.nan)
    found = [None if curve is None else reduce_curve(curve, scope.columns) for curve in curves]
    return np.stack([missing if numbers is None else numbers for numbers in found], axis=1)


def read_clock(history: History, begin: float) -> Curve:
    """Seconds from ``begin`` to the first event of each step of which the time is known."""
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
