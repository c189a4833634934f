"""Columns keep the extremes of their steps."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from retrograd.core.views.downsample import reduce_columns, share_columns

numbers = st.floats(-1e6, 1e6) | st.just(math.nan)
tables = st.tuples(st.integers(1, 4), st.integers(1, 60)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=numbers)
)


@given(tables, st.integers(1, 20))
def test_each_column_has_the_extremes_and_the_mean_of_its_own_values(values: np.ndarray, width: int) -> None:
    bands = reduce_columns(values, width)
    for row, line in enumerate(values):
        pieces = [line[start : start + width] for start in range(0, len(line), width)]
        assert bands.low.shape[1] == len(pieces)
        for column, piece in enumerate(pieces):
            known = [value for value in piece if not math.isnan(value)]
            cell = bands.low[row, column], bands.mean[row, column], bands.high[row, column]
            if not known:
                assert all(math.isnan(number) for number in cell)
                continue
            assert cell[0] == min(known)
            assert cell[1] == pytest.approx(math.fsum(known) / len(known), rel=1e-9, abs=1e-6)
            assert cell[2] == max(known)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=200, unique=True).map(sorted), st.integers(1, 50))
def test_columns_share_all_steps_in_order_and_stay_few(steps: list[int], most: int) -> None:
    columns = share_columns(np.array(steps), most)
    assert len(columns) <= most
    assert columns.first[0] == steps[0]
    assert columns.last[-1] == steps[-1]
    groups = [steps[i : i + columns.width] for i in range(0, len(steps), columns.width)]
    assert [group[0] for group in groups] == columns.first.tolist()
    assert [group[-1] for group in groups] == columns.last.tolist()
    assert [number for number, group in enumerate(groups) for _ in group] == columns.place(np.array(steps)).tolist()


def test_infinite_numbers_stay_extremes() -> None:
    bands = reduce_columns(np.array([[1.0, np.inf, -np.inf, 2.0]]), 2)
    assert bands.high.tolist() == [[np.inf, 2.0]]
    assert bands.low.tolist() == [[1.0, -np.inf]]


def test_as_few_steps_as_columns_are_left_as_they_are() -> None:
    values = np.array([[3.0, np.nan, 1.0]])
    bands = reduce_columns(values, share_columns(np.arange(3), 1000).width)
    assert bands.low is bands.mean is bands.high is values
