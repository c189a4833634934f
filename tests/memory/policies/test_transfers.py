"""How much may be on its way out of memory."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from retrograd.memory.policies import transfers
from retrograd.memory.policies.transfers import InFlight
from tests.memory.saved.interrupter import Interrupter

SIZES = st.integers(1, 100)


@given(st.lists(SIZES), st.integers(0, 300))
def test_what_stays_is_the_last_that_fits_and_the_newest_always(sizes: list[int], window: int) -> None:
    under_way: InFlight[int] = InFlight()
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


def test_an_interrupt_at_any_instruction_leaves_what_fits() -> None:
    def fill(interrupter: Interrupter) -> None:
        under_way: InFlight[int] = InFlight()
        with suppress(KeyboardInterrupt), interrupter:
            for number in range(6):
                under_way.add(number, 10, 25)
            under_way.drain()
        for number in range(6, 20):
            under_way.add(number, 10, 25)
        assert under_way.drain() == [18, 19]
        assert under_way.drain() == []

    files = frozenset({str(transfers.__file__)})
    counter = Interrupter(files, 0, is_realistic=False)
    fill(counter)
    assert counter.count > 100
    for place in range(1, counter.count + 1):
        fill(Interrupter(files, place, is_realistic=False))
