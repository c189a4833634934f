"""How much may be on its way out of memory, and in which order it is asked for again."""

from __future__ import annotations

import random
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.memory.policies import transfers
from retrograd.memory.policies.transfers import AskOrder, InFlight
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


# ---- order ----------------------------------------------------------------------------------------------------


class Numbered:
    """Something that is packed."""

    def __init__(self, number: int) -> None:
        self.number = number


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(0, 60), st.randoms())
def test_what_is_due_is_what_a_look_at_all_that_follows_would_find(
    sizes: list[int], window: int, chance: random.Random
) -> None:
    order: AskOrder[Numbered] = AskOrder()
    least = 2
    asked = list(range(len(sizes) - 1, -1, -1))
    for attempt in range(2):
        items = [Numbered(number) for number in range(len(sizes))]
        places = [order.add(item, size) for item, size in zip(items, sizes, strict=True)]
        given_out: set[int] = set()
        for turn, number in enumerate(asked):
            order.ask(places[number])
            found = [item.number for item in order.due(places[number], window, least, is_missed=False)]
            missing, ahead = list[int](), 0
            for count, follower in enumerate(asked[turn + 1 :]):
                if count >= least and ahead >= (window if missing else window // 2):
                    break
                if follower not in given_out:
                    missing.append(follower)
                ahead += sizes[follower]
            assert found == missing
            given_out.update(found)
        assert given_out == set(asked[1:])
        if not attempt:  # the next pass goes another way, which the third one has learned
            chance.shuffle(asked)
            again = [order.add(item, size) for item, size in zip(items, sizes, strict=True)]
            for number in asked:
                order.ask(again[number])


def test_what_was_missed_begins_anew_what_follows() -> None:
    order: AskOrder[Numbered] = AskOrder()
    items = [Numbered(number) for number in range(6)]
    places = [order.add(item, 1) for item in items]

    def due(number: int, *, is_missed: bool) -> list[int]:
        order.ask(places[number])
        return [item.number for item in order.due(places[number], 2, 2, is_missed=is_missed)]

    assert due(5, is_missed=True) == [4, 3]
    assert due(1, is_missed=True) == [0]
    assert due(4, is_missed=False) == []
    assert due(3, is_missed=True) == [2, 1]
    assert due(5, is_missed=True) == [4, 3]


def one_pass(order: AskOrder[Numbered], sizes: list[int], asked: list[int]) -> list[list[int]]:
    """What is foreseen at each request."""
    items = [Numbered(number) for number in range(len(sizes))]
    places = [order.add(item, size) for item, size in zip(items, sizes, strict=True)]
    seen = []
    for number in asked:
        order.ask(places[number])
        seen.append([item.number for item in order.upcoming(places[number])])
    return seen


def test_what_is_asked_for_twice_counts_once() -> None:
    order: AskOrder[Numbered] = AskOrder()
    one_pass(order, [1, 2, 3], [2, 2, 0, 2, 1])
    assert one_pass(order, [1, 2, 3], [2, 0]) == [[0, 1], [1]]


def test_what_is_gone_is_not_foreseen() -> None:
    order: AskOrder[Numbered] = AskOrder()
    items = [Numbered(number) for number in range(3)]
    places = [order.add(item, 1) for item in items]
    del items[1]
    order.ask(places[2])
    assert [item.number for item in order.upcoming(places[2])] == [0]
