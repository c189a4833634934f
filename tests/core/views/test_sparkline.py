"""A curve in one line of text."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from retrograd.core.views.terminal import BLOCKS, draw_sparkline


def test_heights_follow_the_numbers() -> None:
    assert draw_sparkline(np.arange(8.0), 8, logarithmic=False) == BLOCKS
    assert draw_sparkline(10.0 ** np.arange(8), 8) == BLOCKS


def test_a_spike_among_many_steps_is_seen() -> None:
    values = np.ones(10_000)
    values[5_432] = 1000.0
    drawn = draw_sparkline(values, 20)
    assert drawn.count("█") == 1
    assert drawn.index("█") == 5_432 * 20 // 10_000


def test_what_is_missing_is_a_gap() -> None:
    assert draw_sparkline(np.array([1.0, np.nan, 2.0]), 8) == "▁ █"


@given(st.lists(st.floats(), max_size=100), st.integers(1, 30), st.booleans())
def test_any_numbers_can_be_drawn(values: list[float], width: int, logarithmic: bool) -> None:
    drawn = draw_sparkline(np.array(values), width, logarithmic=logarithmic)
    assert len(drawn) <= width
    assert set(drawn) <= {*BLOCKS, " "}
