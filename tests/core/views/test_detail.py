"""Digits go before columns, and both only when they must."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from retrograd.core.views.report.scope import FEWEST_COLUMNS, MANTISSAS, choose_detail


@given(st.integers(0, 5000), st.integers(0, 10**6), st.integers(FEWEST_COLUMNS, 4000), st.floats(1e5, 1e8))
def test_never_more_columns_than_asked_and_columns_go_last(sites: int, steps: int, most: int, room: float) -> None:
    columns, bits = choose_detail(sites, steps, most, room)
    assert 1 <= columns <= max(min(most, steps), FEWEST_COLUMNS)
    if bits > MANTISSAS[-1]:
        assert columns == max(min(most, steps), 1)


@given(st.integers(1, 2000), st.integers(1, 10**5), st.floats(1e5, 1e7))
def test_more_room_never_means_less_detail(sites: int, steps: int, room: float) -> None:
    small, large = choose_detail(sites, steps, 1000, room), choose_detail(sites, steps, 1000, 2 * room)
    assert large[0] >= small[0]
    assert large[1] >= small[1]


def test_a_demo_is_written_in_full() -> None:
    assert choose_detail(200, 460, 1000, 7e6) == (460, MANTISSAS[0])
