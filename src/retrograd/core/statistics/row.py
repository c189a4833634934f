"""A row: everything one site tells about its elements, in numbers that merge exactly.

A row is read from one tensor, and rows are merged over calls, micro-batches, steps and ranks; the row of
a union is the merge of the rows of its parts. Non-finite elements are counted and then left out: ``sum``,
``m2``, ``abs_sum``, ``min`` and ``max`` speak of the finite elements alone.

    n       finite elements         n = count − nan − pos_inf − neg_inf
    sum     Σ x
    m2      Σ (x − sum/n)²          merged as m2ₐ + m2ᵦ + (meanₐ − meanᵦ)² nₐ nᵦ / (nₐ + nᵦ)   (Chan et al. 1979)
    abs_sum Σ |x|

The exponent histogram counts finite, non-zero elements by binary exponent: bin ``e + 127`` holds those
with 2^e ≤ |x| < 2^(e+1), clamped to bins 0…254 (a float32's normal numbers are bins 1…254; bin 0 also holds
everything smaller). Its 255 bins are stored as the stretch between the first and the last that is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

BINS = 255
"""Bins of the exponent histogram."""

EXPONENT_BIAS = 127
"""Bin number of exponent 0, that is of 1 ≤ |x| < 2."""

ROW = np.dtype(
    [
        ("row", "<i4"),  # which row of the slab, that is which site
        ("calls", "<i4"),  # tensors merged into this row
        ("order", "<i8"),  # how many other rows had been reached when this one first was; −1 where that is not known
        ("count", "<i8"),  # elements
        ("nan", "<i8"),
        ("pos_inf", "<i8"),
        ("neg_inf", "<i8"),
        ("zeros", "<i8"),
        ("sum", "<f8"),
        ("m2", "<f8"),
        ("abs_sum", "<f8"),
        ("min", "<f8"),  # +inf when there is no finite element
        ("max", "<f8"),  # −inf when there is no finite element
        ("reference", "<f8"),  # Σ w² of the weight an update was added to; 0 elsewhere
        ("first_bin", "<i4"),  # first bin of the stretch that is stored
        ("bins", "<i4"),  # length of that stretch; 0 when there is none
    ]
)
"""Layout of a drained row, shared with the compiled kernel (112 bytes, little-endian, packed)."""

COUNTS = ("count", "nan", "pos_inf", "neg_inf", "zeros")
_MERGED_WITH_M2 = frozenset({"sum", "count", "nan", "pos_inf", "neg_inf"})
ADDED = ("calls", *COUNTS, "abs_sum", "sum", "reference")
STATISTICS = (
    "count", "nan", "pos_inf", "neg_inf", "zeros",
    "mean", "std", "rms", "l1", "l2", "min", "max", "abs_max",
    "zero_share", "nonfinite", "update_ratio",
)  # fmt: skip
"""Names that :func:`derive` understands."""


def merge_rows(rows: Mapping[str, npt.NDArray[Any]], groups: IntArray, n_groups: int) -> dict[str, npt.NDArray[Any]]:
    """Merge rows that belong together.

    Args:
        rows: columns of equal length: those of :data:`ROW` without ``row``, ``first_bin``, ``bins``, or some of them;
            with ``m2`` those of :func:`list_columns`.
        groups: for each row the number of its group, 0 … ``n_groups − 1``.
        n_groups: how many groups there are.

    Returns:
        The same columns, one entry a group.
    """
    merged: dict[str, npt.NDArray[Any]] = {}
    for name in _among(rows, ADDED):
        column = np.asarray(rows[name])
        total = np.zeros(n_groups, dtype=column.dtype)
        np.add.at(total, groups, column)
        merged[name] = total
    for name in _among(rows, ("min", "max")):
        merged[name] = np.full(n_groups, EMPTY_ROW[name])
        (np.minimum if name == "min" else np.maximum).at(merged[name], groups, rows[name])
    if "order" in rows:
        merged["order"] = _merge_orders(np.asarray(rows["order"], np.int64), groups, n_groups)
    if "m2" in rows:
        n = finite_count(rows)
        mean = _ratio(np.asarray(rows["sum"]), n)
        group_mean = _ratio(merged["sum"], finite_count(merged))
        merged["m2"] = np.zeros(n_groups)
        np.add.at(merged["m2"], groups, rows["m2"] + n * (mean - group_mean[groups]) ** 2)
    return merged


def _among(rows: Mapping[str, npt.NDArray[Any]], names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name in rows]


EMPTY_ROW = {"min": np.inf, "max": -np.inf, "order": np.iinfo(np.int64).max}
"""What a row of no elements has in columns that are not 0."""


def merge_into(
    table: Mapping[str, npt.NDArray[Any]], where: IntArray | slice, rows: Mapping[str, npt.NDArray[Any]]
) -> None:
    """Merge rows into those of a table, each into one of its own.

    Args:
        table: columns as for :func:`merge_rows`, which are changed; a row of no elements is 0, but for
            :data:`EMPTY_ROW`.
        where: the row of the table for each row; none twice.
        rows: the same columns, or more.
    """
    if "m2" in table:
        n, held = finite_count(rows), {name: table[name][where] for name in _MERGED_WITH_M2}
        n_held = finite_count(held)
        apart = np.where((n > 0) & (n_held > 0), _ratio(np.asarray(rows["sum"]), n) - _ratio(held["sum"], n_held), 0.0)
        table["m2"][where] += rows["m2"] + apart * apart * (n * _ratio(n_held, n + n_held))
    for name in _among(table, ADDED):
        if not _is_nothing(rows[name]):
            table[name][where] += rows[name]
    for name in _among(table, ("min", "max", "order")):
        better = np.maximum if name == "max" else np.minimum
        table[name][where] = better(table[name][where], rows[name])


def _is_nothing(column: npt.NDArray[Any]) -> bool:
    """Return whether a column is 0, and one number for all rows: then it need not be added."""
    return column.strides == (0,) and not column[:1].any()


def _merge_orders(orders: IntArray, groups: IntArray, n_groups: int) -> IntArray:
    """The first of each group; −1 for one in which it is not known, or that is empty."""
    last = np.iinfo(np.int64).max
    first = np.full(n_groups, last)
    np.minimum.at(first, groups, orders)
    return np.where(first == last, -1, first)


def finite_count(rows: Mapping[str, npt.NDArray[Any]]) -> IntArray:
    """Number of finite elements of each row."""
    return np.asarray(rows["count"] - rows["nan"] - rows["pos_inf"] - rows["neg_inf"], dtype=np.int64)


def derive(rows: Mapping[str, npt.NDArray[Any]], statistic: str) -> npt.NDArray[Any]:
    """Derive one of :data:`STATISTICS` from the columns of rows.

    ``std`` is that of the population (divided by n). Where there is no finite element, ``mean``, ``std``,
    ``rms``, ``min``, ``max`` and ``abs_max`` are NaN. ``update_ratio`` is ‖Δw‖₂ / ‖w‖₂ and NaN for anything
    that is not an update. Shares are of all elements.

    Raises:
        KeyError: for a name that is not a statistic.
    """
    return np.asarray(rows[statistic]) if statistic in COUNTS else _DERIVED[statistic](rows)


class _Noting(dict[str, npt.NDArray[Any]]):
    """Columns of no rows, which notes those that are asked for."""

    def __missing__(self, name: str) -> npt.NDArray[Any]:
        self[name] = np.empty(0, ROW[name])
        return self[name]


@functools.cache
def list_columns(statistic: str) -> frozenset[str]:
    """The columns that a statistic is derived from, and those that are merged with them.

    Raises:
        KeyError: for a name that is not a statistic.
    """
    asked = _Noting()
    derive(asked, statistic)
    return frozenset(asked) | (_MERGED_WITH_M2 if "m2" in asked else frozenset())


def scale_rows(rows: dict[str, npt.NDArray[Any]], factor: npt.NDArray[np.float64]) -> None:
    """Multiply the elements of each row by a positive power of two, in place (histograms apart)."""
    for name in ("sum", "abs_sum", "min", "max"):
        rows[name] = rows[name] * factor
    rows["m2"] = rows["m2"] * factor * factor


def _ratio(numerator: npt.NDArray[Any], denominator: npt.NDArray[Any], empty: float = 0.0) -> FloatArray:
    out = np.full(len(denominator), empty)
    np.divide(numerator, denominator, out=out, where=np.asarray(denominator) != 0)
    return out


def _mean(rows: Mapping[str, npt.NDArray[Any]]) -> FloatArray:
    return _ratio(np.asarray(rows["sum"]), finite_count(rows), np.nan)


def _sum_of_squares(rows: Mapping[str, npt.NDArray[Any]]) -> FloatArray:
    total = np.asarray(rows["sum"], dtype=np.float64)
    return np.asarray(rows["m2"], dtype=np.float64) + total * _ratio(total, finite_count(rows))


def _when_any(rows: Mapping[str, npt.NDArray[Any]], values: npt.NDArray[Any]) -> FloatArray:
    return np.where(finite_count(rows) > 0, values, np.nan)


_DERIVED: dict[str, Callable[[Mapping[str, npt.NDArray[Any]]], npt.NDArray[Any]]] = {
    "mean": _mean,
    "std": lambda rows: np.sqrt(_ratio(np.asarray(rows["m2"]), finite_count(rows), np.nan)),
    "rms": lambda rows: np.sqrt(_ratio(_sum_of_squares(rows), finite_count(rows), np.nan)),
    "l1": lambda rows: np.asarray(rows["abs_sum"]),
    "l2": lambda rows: np.sqrt(_sum_of_squares(rows)),
    "min": lambda rows: _when_any(rows, np.asarray(rows["min"])),
    "max": lambda rows: _when_any(rows, np.asarray(rows["max"])),
    "abs_max": lambda rows: _when_any(rows, np.maximum(np.abs(rows["min"]), np.abs(rows["max"]))),
    "zero_share": lambda rows: _ratio(np.asarray(rows["zeros"]), np.asarray(rows["count"]), np.nan),
    "nonfinite": lambda rows: np.asarray(rows["nan"] + rows["pos_inf"] + rows["neg_inf"]),
    "update_ratio": lambda rows: _ratio(np.sqrt(_sum_of_squares(rows)), np.sqrt(rows["reference"]), np.nan),
}
