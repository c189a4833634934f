"""Rows merge exactly: in any order, in any grouping, to the row of all elements together."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrograd.core.statistics.row import (
    ADDED,
    EMPTY_ROW,
    ROW,
    STATISTICS,
    derive,
    merge_into,
    merge_rows,
    scale_rows,
)
from tests.core.statistics.oracle import expected_row

Rows = dict[str, npt.NDArray[np.float64]]

numbers = st.floats(-1e6, 1e6, width=32, allow_subnormal=False) | st.sampled_from(
    [0.0, 1e-30, math.nan, math.inf, -math.inf]
)
tensors = st.lists(numbers, max_size=20).map(np.array)


def rows_of(parts: list[npt.NDArray[np.float64]], reference: float = 0.0) -> Rows:
    rows = [expected_row(part) | {"reference": reference, "order": 7 + number} for number, part in enumerate(parts)]
    return {name: np.array([row[name] for row in rows], ROW[name]) for name in rows[0]}


def merge_all(rows: Rows) -> Rows:
    return merge_rows(rows, np.zeros(len(rows["count"]), np.int64), 1)


def assert_same(left: Rows, right: Rows) -> None:
    for name in ("calls", "count", "nan", "pos_inf", "neg_inf", "zeros", "min", "max"):
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)
    magnitude = right["abs_sum"]
    np.testing.assert_allclose(left["abs_sum"], magnitude, rtol=1e-12)
    np.testing.assert_allclose(left["sum"], right["sum"], rtol=1e-12, atol=1e-12 * magnitude.max(initial=0))
    squares = right["m2"] + magnitude**2
    np.testing.assert_allclose(left["m2"], right["m2"], rtol=1e-9, atol=1e-12 * squares.max(initial=0))


@given(st.lists(tensors, min_size=1, max_size=6))
def test_the_merge_is_the_row_of_the_union(parts: list[npt.NDArray[np.float64]]) -> None:
    union = rows_of([np.concatenate(parts)])
    union["calls"][:] = len(parts)
    assert_same(merge_all(rows_of(parts)), union)
    assert_same(merge_one_by_one(rows_of(parts)), union)


def merge_one_by_one(rows: Rows) -> Rows:
    """Merge rows into the second of three rows of a table; it alone is returned, the others have to stay empty."""
    table = {name: np.full(3, EMPTY_ROW.get(name, 0), column.dtype) for name, column in rows.items()}
    for number in range(len(rows["count"])):
        merge_into(table, np.array([1]), {name: column[number : number + 1] for name, column in rows.items()})
    for name, column in table.items():
        assert column[0] == column[2] == EMPTY_ROW.get(name, 0)
    assert table["order"][1] == rows["order"].min()
    return {name: column[1:2] for name, column in table.items()}


@given(st.lists(tensors, min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_order_does_not_matter(parts: list[npt.NDArray[np.float64]], random: object) -> None:
    shuffled = list(parts)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert_same(merge_all(rows_of(parts)), merge_all(rows_of(shuffled)))


@given(st.lists(tensors, min_size=2, max_size=8), st.data())
def test_grouping_does_not_matter(parts: list[npt.NDArray[np.float64]], data: st.DataObject) -> None:
    groups = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(parts), max_size=len(parts))), np.int64)
    assert_same(merge_all(merge_rows(rows_of(parts), groups, 3)), merge_all(rows_of(parts)))


@given(tensors)
def test_merging_with_nothing_changes_nothing(part: npt.NDArray[np.float64]) -> None:
    merged = merge_all(rows_of([np.array([]), part]))
    merged["calls"] -= 1
    assert_same(merged, rows_of([part]))


def test_groups_without_rows_are_empty() -> None:
    merged = merge_rows(rows_of([np.array([1.0, 2.0])]), np.array([2]), 4)
    assert merged["count"].tolist() == [0, 0, 2, 0]
    assert derive(merged, "mean").tolist()[2] == 1.5
    assert np.isnan(derive(merged, "rms")[[0, 1, 3]]).all()


@given(st.lists(tensors, min_size=1, max_size=4))
def test_derived_statistics(parts: list[npt.NDArray[np.float64]]) -> None:
    merged = merge_all(rows_of(parts))
    x = np.concatenate(parts)
    finite = x[np.isfinite(x)]
    size = np.abs(finite).sum()
    expected = {
        "count": len(x),
        "nonfinite": len(x) - len(finite),
        "l1": size,
        "l2": np.linalg.norm(finite) if finite.size else 0.0,
        "zero_share": (x == 0).mean() if x.size else math.nan,
        "update_ratio": math.nan,
    }
    if finite.size:
        expected |= {
            "mean": finite.mean(),
            "std": finite.std(),
            "rms": np.sqrt((finite**2).mean()),
            "min": finite.min(),
            "max": finite.max(),
            "abs_max": np.abs(finite).max(),
        }
    else:
        expected |= dict.fromkeys(("mean", "std", "rms", "min", "max", "abs_max"), math.nan)
    for name, value in expected.items():
        np.testing.assert_allclose(derive(merged, name), [value], rtol=1e-9, atol=1e-7 * size, err_msg=name)


def test_update_ratio_is_a_ratio_of_norms() -> None:
    rows = rows_of([np.array([3.0, 4.0])], reference=100.0)
    assert derive(rows, "update_ratio").tolist() == [0.5]


def test_every_statistic_can_be_derived_and_no_other() -> None:
    rows = rows_of([np.array([1.0])])
    assert all(derive(rows, name).shape == (1,) for name in STATISTICS)
    with pytest.raises(KeyError):
        derive(rows, "median")


@given(tensors, st.integers(-40, 40))
def test_scaling_rows_is_scaling_elements(part: npt.NDArray[np.float64], exponent: int) -> None:
    factor = 2.0**exponent
    rows = rows_of([part])
    scale_rows(rows, np.array([factor]))
    assert_same(rows, rows_of([part * factor]))


def test_the_first_of_a_group_is_its_order() -> None:
    rows = rows_of([np.ones(1)] * 5) | {"order": np.array([5, 3, -1, 8, 9])}
    merged = merge_rows(rows, np.array([0, 0, 1, 1, 3]), 4)
    assert merged["order"].tolist() == [3, -1, -1, 9]


def test_columns_that_add_are_columns_of_a_row() -> None:
    assert set(ADDED) <= set(ROW.names or ())
    assert ROW.itemsize == 112
