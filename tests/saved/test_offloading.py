"""What is copied when, against an engine that makes every copy as late as it may; and the order and the buffers."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retrograd.saved.buffer_pool import BufferPool
from retrograd.saved.offloading import Offloaded, Offloader, Stayed
from retrograd.saved.order import Order
from retrograd.saved.policy import Packed

MB = 1 << 20


class LateEngine:
    """Copies are made when they are waited for, or when a later copy of the same buffer needs them; no sooner.

    So a copy out whose source was freed too early reads what has been written there since.
    """

    def __init__(self) -> None:
        self.pending: dict[int, list[tuple[int, object]]] = {}
        self.done: set[int] = set()
        self.copies: list[tuple[str, int]] = []
        self.allocated = 0
        self._count = 0

    def allocate(self, nbytes: int) -> Tensor:
        self.allocated += nbytes
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def copy_out(self, values: Tensor, buffer: Tensor) -> int:
        address, size = values.data_ptr(), values.nbytes  # a device copies addresses: it holds no reference
        source = torch.frombuffer(_memory_at(address, size), dtype=torch.uint8)
        return self._begin("out", buffer, lambda: buffer[:size].copy_(source), size)

    def copy_in(self, buffer: Tensor, like: Tensor, numel: int) -> tuple[Tensor, int]:
        values = torch.full((numel,), -7.0).to(like.dtype)
        size = values.nbytes
        ticket = self._begin("in", buffer, lambda: values.view(torch.uint8).copy_(buffer[:size]), size)
        return values, ticket

    def wait(self, ticket: int) -> None:
        for queue in self.pending.values():
            if any(number == ticket for number, _ in queue):
                while queue:
                    number, run = queue.pop(0)
                    run()  # type: ignore[operator]
                    self.done.add(number)
                    if number == ticket:
                        break
        assert ticket in self.done

    def _begin(self, kind: str, buffer: Tensor, run: object, size: int) -> int:
        self._count += 1
        self.copies.append((kind, size))
        self.pending.setdefault(buffer.data_ptr(), []).append((self._count, run))
        return self._count


def _memory_at(address: int, size: int) -> object:
    import ctypes

    return (ctypes.c_char * size).from_address(address)


def values_of(number: int, size: int = 1000) -> Tensor:
    return torch.arange(size, dtype=torch.float32) + 10_000 * number


def forward(offloader: Offloader, numbers: range, size: int = 1000) -> tuple[list[Packed], list[Tensor | None]]:
    """Packs; what is freed is written to at once, as the next layer's output would be."""
    packed: list[Packed] = []
    memory = [values_of(number, size) for number in numbers]
    for values in memory:
        one = offloader.add(values)
        assert one is not None
        packed.append(one)
        for other, source in zip(packed, memory, strict=False):
            if isinstance(other, Offloaded) and other.values is None:
                source.fill_(-1.0)
    return packed, list(memory)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 12_000),
    st.lists(st.sampled_from(["backwards", "shuffled", "twice", "dropped", "half"]), min_size=1, max_size=6),
    st.integers(0, 1000),
)
def test_values_come_back_whatever_the_window_and_the_order(window: int, passes: list[str], seed: int) -> None:
    engine = LateEngine()
    offloader = Offloader(engine, window)
    chance = random.Random(seed)
    for kind in passes:
        packed, memory = forward(offloader, range(8))
        order = list(range(7, -1, -1))
        if kind == "shuffled":
            chance.shuffle(order)
        if kind == "half":
            order = order[:4]
        for number in [] if kind == "dropped" else order * (2 if kind == "twice" else 1):
            assert torch.equal(packed[number].restore(), values_of(number))
        del packed, memory
    assert all(number in engine.done for number in range(1, engine._count + 1) if _was_seen(engine, number))


def _was_seen(engine: LateEngine, number: int) -> bool:
    return not any(number == other for queue in engine.pending.values() for other, _ in queue)


def test_no_more_than_the_window_is_held_on_the_way_out() -> None:
    offloader = Offloader(LateEngine(), window=10_000)
    packed, _ = forward(offloader, range(20))
    held = [one for one in packed if isinstance(one, Offloaded) and one.values is not None]
    assert sum(one.nbytes for one in held) <= 10_000
    assert held == packed[-len(held) :]


def test_what_is_still_there_is_not_copied_back() -> None:
    engine = LateEngine()
    offloader = Offloader(engine, window=8_000)
    packed, memory = forward(offloader, range(6))
    assert packed[5].restore().data_ptr() == memory[5].data_ptr()  # type: ignore[union-attr]
    assert [kind for kind, _ in engine.copies].count("in") <= 2


def test_what_was_needed_first_does_not_leave_again() -> None:
    engine = LateEngine()
    offloader = Offloader(engine, window=8_000)
    for attempt in range(2):
        engine.copies.clear()
        packed, memory = forward(offloader, range(6))
        stayed = [number for number, one in enumerate(packed) if isinstance(one, Stayed)]
        assert stayed == ([4, 5] if attempt else [])
        assert [kind for kind, _ in engine.copies].count("out") == 6 - len(stayed)
        for number in range(5, -1, -1):
            assert torch.equal(packed[number].restore(), values_of(number))
        del packed, memory


def test_the_next_ones_are_on_their_way_before_they_are_asked_for() -> None:
    offloader = Offloader(LateEngine(), window=8_000)
    packed, _ = forward(offloader, range(8))
    packed[7].restore()
    packed[6].restore()
    packed[5].restore()
    on_their_way = [n for n, one in enumerate(packed) if isinstance(one, Offloaded) and one.arriving is not None]
    assert on_their_way == [3, 4]


def test_buffers_are_used_again_and_the_limit_holds() -> None:
    engine = LateEngine()
    offloader = Offloader(engine, window=0, limit=6 * MB)
    for _ in range(5):
        packed = [offloader.add(values_of(n, MB // 4)) for n in range(5)]
        assert [one is None for one in packed] == [False, False, False, True, True]
        for number in (2, 1, 0):
            assert torch.equal(packed[number].restore(), values_of(number, MB // 4))  # type: ignore[union-attr]
        del packed
    assert engine.allocated == 6 * MB


def test_nothing_is_held_when_the_graph_is_gone() -> None:
    gc.disable()
    try:
        offloader = Offloader(LateEngine(), window=4_000)
        packed, _ = forward(offloader, range(6))
        packed[5].restore()
        packed[4].restore()
        del packed
        offloader.pool.clear()
        assert offloader.pool.nbytes == 0
    finally:
        gc.enable()


# ---- order ----------------------------------------------------------------------------------------------------


class Item:
    def __init__(self, number: int) -> None:
        self.number = number


def one_pass(order: Order[Item], sizes: list[int], asked: list[int]) -> list[list[int]]:
    """What is foreseen at each request."""
    items = [Item(number) for number in range(len(sizes))]
    places = [order.add(item, size) for item, size in zip(items, sizes, strict=True)]
    seen = []
    for number in asked:
        order.ask(places[number])
        seen.append([item.number for item in order.upcoming(places[number])])
    return seen


def test_at_first_the_reverse_is_foreseen() -> None:
    assert one_pass(Order(), [1] * 4, [3, 2]) == [[2, 1, 0], [1, 0]]


def test_then_what_the_last_pass_of_the_kind_did() -> None:
    order: Order[Item] = Order()
    one_pass(order, [1, 2, 3, 4], [1, 3, 0])
    one_pass(order, [5, 5], [0, 1])
    assert one_pass(order, [1, 2, 3, 4], [1, 3, 0, 2]) == [[3, 0], [0], [], [1, 0]]
    assert one_pass(order, [5, 5], [0, 1]) == [[1], []]


def test_what_is_asked_for_twice_counts_once() -> None:
    order: Order[Item] = Order()
    one_pass(order, [1, 2, 3], [2, 2, 0, 2, 1])
    assert one_pass(order, [1, 2, 3], [2, 0]) == [[0, 1], [1]]


def test_what_is_gone_is_not_foreseen() -> None:
    order: Order[Item] = Order()
    items = [Item(number) for number in range(3)]
    places = [order.add(item, 1) for item in items]
    del items[1]
    order.ask(places[2])
    assert [item.number for item in order.upcoming(places[2])] == [0]


# ---- buffers --------------------------------------------------------------------------------------------------


def test_a_buffer_much_too_large_is_not_taken() -> None:
    pool = BufferPool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    large = pool.take(40 * MB)
    assert large is not None
    pool.give(large)
    small = pool.take(3 * MB)
    assert small is not None
    assert small.nbytes == 4 * MB
    assert pool.take(39 * MB) is large


@pytest.mark.parametrize("nbytes", [1, 2 * MB, 2 * MB + 1])
def test_sizes_are_multiples_of_a_unit_and_no_powers_of_two(nbytes: int) -> None:
    pool = BufferPool(lambda size: torch.empty(size, dtype=torch.uint8))
    buffer = pool.take(nbytes)
    assert buffer is not None
    assert nbytes <= buffer.nbytes < nbytes + 2 * MB
