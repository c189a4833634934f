"""How much may be on its way out of memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from retrograd.saved.under_way import UnderWay

SIZES = st.integers(1, 100)


@given(st.lists(SIZES), st.integers(0, 300))
def test_what_stays_is_the_last_that_fits_and_the_newest_always(sizes: list[int], window: int) -> None:
    under_way: UnderWay[int] = UnderWay()
    staying: list[int] = []
    for number, size in enumerate(sizes):
        staying.append(number)
        gone = under_way.add(number, size, window)
        assert staying[: len(gone)] == gone
        del staying[: len(gone)]
        held = sum(sizes[each] for each in staying)
        assert staying[-1] == number
        assert held <= max(window, size)
        assert not gone or held + sizes[gone[-1]] > max(window, size)
    assert under_way.drain() == staying
    assert under_way.drain() == []
