"""What only the compiled slab does: it remembers the last tensor, reads large ones beside other threads, and copies."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from retrograd.core.statistics.slab import Slab, copy_elements, observe_updates
from tests.core.statistics.oracle import assert_row, drain, elements, expected_bins

LARGE = 50_000


def observe_both(slab: Slab, first: Tensor, second: Tensor) -> tuple[np.void, np.void]:
    slab.grow(2)
    slab.observe(first, 0)
    slab.observe(second, 1)
    rows, _ = drain(slab)
    return rows[0], rows[1]


def test_the_same_tensor_again(native: Slab) -> None:
    x = torch.randn(LARGE)
    native.grow(3)
    native.observe(torch.ones(3), 1)
    for row in range(3):
        native.observe(x, row)
    rows, bins = drain(native)
    for row in (0, 2):
        assert_row(rows[row], elements(x))
        np.testing.assert_array_equal(bins[row], expected_bins(elements(x)))
    assert_row(rows[1], np.concatenate([np.ones(3), elements(x)]), calls=2)


def change_in_place(x: Tensor) -> Tensor:
    return x.mul_(2)


def change_a_view(x: Tensor) -> Tensor:
    x[:5] = 100.0
    return x


def exchange_data(x: Tensor) -> Tensor:
    x.data = torch.ones(LARGE)
    return x


def take_a_view(x: Tensor) -> Tensor:
    return x.view(2, -1)[1]


@pytest.mark.parametrize("change", [change_in_place, change_a_view, exchange_data, take_a_view])
def test_a_tensor_that_has_changed_is_read_again(native: Slab, change: object) -> None:
    assert callable(change)
    x = torch.randn(LARGE)
    before = elements(x)
    native.grow(2)
    native.observe(x, 0)
    y = change(x)
    native.observe(y, 1)
    rows, _ = drain(native)
    assert_row(rows[0], before)
    assert_row(rows[1], elements(y))


def test_nothing_is_remembered_beyond_a_drain(native: Slab) -> None:
    x = torch.zeros(LARGE)
    array = x.numpy()  # a write through it leaves torch's version as it is
    native.grow(1)
    native.observe(x, 0)
    drain(native)
    array[:] = 3
    native.observe(x, 0)
    assert_row(drain(native)[0][0], elements(x))


def test_a_new_tensor_at_the_old_address(native: Slab) -> None:
    native.grow(1)
    for k in range(20):
        x = torch.full((LARGE,), float(k))
        native.observe(x, 0)
        assert_row(drain(native)[0][0], elements(x))
        native.observe(x, 0)
        del x
        native.observe(torch.full((LARGE,), -float(k)), 0)
        assert drain(native)[0][0]["sum"] == 0


def test_inference_tensors_have_no_version_and_are_read_each_time(native: Slab) -> None:
    with torch.inference_mode():
        x = torch.ones(LARGE)
        native.grow(2)
        native.observe(x, 0)
        x.mul_(3)
        native.observe(x, 1)
    rows, _ = drain(native)
    assert rows["sum"].tolist() == [LARGE, 3 * LARGE]


@pytest.mark.parametrize("size", [100, 200_000])
def test_one_slab_from_many_threads(native: Slab, size: int) -> None:
    threads, rounds = 4, 40
    tensors = [torch.full((size,), float(2**k)) for k in range(threads)]
    native.grow(1)

    def work(number: int) -> None:
        for turn in range(rounds):
            native.observe(tensors[number], 0)
            native.grow(10 * turn + number)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    rows, bins = drain(native)
    assert rows[0]["calls"] == threads * rounds
    assert rows[0]["count"] == threads * rounds * size
    assert bins[0][127 : 127 + threads].tolist() == [rounds * size] * threads
    assert rows[0]["sum"] == rounds * size * (2**threads - 1)


def test_backward_threads_of_two_models(native: Slab) -> None:
    native.grow(2)

    def train(row: int) -> None:
        weight = torch.ones(300, 300, requires_grad=True)
        weight.register_hook(lambda gradient: native.observe(gradient, row) or None)
        for _ in range(20):
            (weight * 2).sum().backward()

    workers = [threading.Thread(target=train, args=(row,)) for row in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert drain(native)[0]["sum"].tolist() == [20 * 2.0 * 90_000] * 2


COPIED = (
    torch.nn.Parameter(torch.randn(5, 6)),
    torch.randn(700).bfloat16(),
    torch.randn(3, 4).double().t(),
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.arange(9),
    torch.tensor([1.0, float("nan"), float("-inf")]),
    torch.empty(0),
    torch.tensor(2.0),
)


@pytest.mark.parametrize("weight", COPIED)
def test_an_update_is_told_from_copied_elements(native: Slab, weight: Tensor) -> None:
    before = weight.detach().clone()
    [copy] = copy_elements([weight], [])
    assert copy is not None
    with torch.no_grad():
        weight += 1  # what was copied must not follow
    native.grow(1)
    native.observe_update(weight, copy, 0)
    rows, bins = drain(native)
    with torch.no_grad():
        change = weight.float() - before.float() if weight.dtype is torch.bfloat16 else weight - before
    assert_row(rows[0], elements(change))
    np.testing.assert_array_equal(bins[0], expected_bins(elements(change)))
    finite = elements(before)[np.isfinite(elements(before))]
    np.testing.assert_allclose(rows[0]["reference"], (finite**2).sum(), rtol=1e-6)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(4, 4)[:, 1:], torch.ones(1).expand(3), torch.ones(3).to_sparse(), torch.ones(3, device="meta"),
     torch.ones(3, dtype=torch.complex64), torch._neg_view(torch.ones(3))],
)  # fmt: skip
def test_what_is_not_copied(tensor: Tensor) -> None:
    small = torch.ones(2)
    first, found, last = copy_elements([small, tensor, small], [])
    assert found is None
    assert first == last is not None


def test_copies_are_made_in_the_memory_of_earlier_ones() -> None:
    weights: list[Tensor | None] = [torch.randn(5), torch.randn(40_000), None]
    first = copy_elements(weights, [])
    for weight in weights[:2]:
        assert weight is not None
        weight.add_(1)
    other = bytearray(3)
    again = copy_elements(weights, [first[0], other])
    assert again[0] is first[0]
    assert again[1] is not other
    assert again[2] is first[2] is None
    for copy, weight in zip(again[:2], weights[:2], strict=True):
        assert copy is not None
        assert weight is not None
        assert copy.startswith(weight.numpy().tobytes())


def test_copies_of_more_than_stays_in_a_cache_are_whole_too() -> None:
    large = torch.arange((1 << 20) + 9, dtype=torch.float32)
    weights: list[Tensor | None] = [large, torch.randn(3), large[1:], torch.ones(7, dtype=torch.int8), torch.ones(0)]
    rooms = copy_elements(weights, [])
    large.add_(1)
    for copy, room, weight in zip(copy_elements(weights, rooms), rooms, weights, strict=True):
        assert copy is room is not None
        assert weight is not None
        assert copy[:-8] == weight.numpy().tobytes()


@pytest.mark.parametrize(
    "new", [torch.ones(4), torch.ones(6, dtype=torch.float16), torch.ones(3, dtype=torch.int32), torch.ones(3, 2)[:, 0]]
)
def test_copied_elements_of_another_tensor(native: Slab, new: Tensor) -> None:
    native.grow(1)
    [copy] = copy_elements([torch.ones(3)], [])
    with pytest.raises(ValueError, match="one size and dtype"):
        native.observe_update(new, copy, 0)
    with pytest.raises(ValueError, match="one size and dtype"):
        native.observe_update(new, bytearray(), 0)
    assert native.drain() == (b"", b"")


def test_a_weight_that_lies_otherwise_after_its_update(native: Slab) -> None:
    native.grow(1)
    weight = torch.randn(2, 3, 4, 5)
    [copy] = copy_elements([weight], [])
    with pytest.raises(ValueError, match="one size and dtype"):
        native.observe_update(weight.to(memory_format=torch.channels_last), copy, 0)


def test_updates_of_a_list_are_those_of_each_one(native: Slab) -> None:
    weights = [weight.detach().clone() for weight in COPIED]
    copies: list[Any] = copy_elements(weights, [])
    for weight in weights:
        weight += 1
    rows = list(range(len(weights)))
    native.grow(len(weights))
    for weight, copy, row in zip(weights, copies, rows, strict=True):
        native.observe_update(weight, copy, row)
    one_by_one = native.drain()
    assert observe_updates(native, weights, copies, rows, 0, bytearray(16 * len(weights))) == len(weights)
    assert native.drain() == one_by_one


@pytest.mark.parametrize(
    ("new", "old", "row"),
    [
        (torch.ones(3), torch.zeros(3), 0),  # a copy of another kind
        (torch.ones(4), copy_elements([torch.zeros(3)], [])[0], 0),
        (torch.ones(3).to_sparse(), copy_elements([torch.zeros(3)], [])[0], 0),
        (torch.ones(3), copy_elements([torch.zeros(3)], [])[0], 2),
    ],
)
def test_a_list_of_updates_ends_before_one_that_must_be_seen_by_itself(
    native: Slab, new: Tensor, old: Any, row: int
) -> None:
    native.grow(2)
    plain, copy = torch.ones(3), copy_elements([torch.zeros(3)], [])[0]
    news, olds, rows = [plain, new, plain], [copy, old, copy], [1, row, 1]
    assert observe_updates(native, news, olds, rows, 0, bytearray(16 * len(news))) == 1
    assert observe_updates(native, news, olds, rows, 1, bytearray(16 * len(news))) == 1
    assert observe_updates(native, news, olds, rows, 2, bytearray(16 * len(news))) == 3
    found, _ = drain(native)
    assert found["row"].tolist() == [1]
    assert found["count"].tolist() == [6]


@pytest.mark.parametrize("spread", [1, 2, 30, 32, 34, 200], ids=str)
def test_exponents_are_counted_in_blocks_of_all_kinds(native: Slab, spread: int) -> None:
    """Of any length, with few exponents or many, zeros or infinities, and more than the counters of a window hold."""
    generator = np.random.default_rng(spread)
    parts = []
    for length in (512 * 80, 1, 193, 192, 512, 130):
        exponents = np.clip(generator.integers(-150, 100) + generator.integers(0, spread, length), -160, 127)
        parts.append(np.ldexp(generator.uniform(1, 2, length), exponents).astype(np.float32))
        parts[-1][generator.random(length) < generator.choice([0, 0.3])] = generator.choice([0, np.inf])
    x = np.concatenate([*parts, np.zeros(600, np.float32), parts[0]])
    native.grow(1)
    native.observe(torch.from_numpy(x), 0)
    _, bins = drain(native)
    np.testing.assert_array_equal(bins[0], expected_bins(x[np.isfinite(x)]))


def assert_bins(native: Slab, x: np.ndarray) -> None:
    native.grow(1)
    native.observe(torch.from_numpy(x), 0)
    rows, bins = drain(native)
    np.testing.assert_array_equal(bins[0], expected_bins(x[np.isfinite(x)]))
    assert rows[0]["zeros"] == (x == 0).sum()


@pytest.mark.parametrize("top", [*range(-149, 128, 13), 125, 126, 127], ids=str)
@pytest.mark.parametrize("apart", [0, 1, 23, 24, 25, 26, 27, 29, 30, 31, 59, 61, 127, 254], ids=str)
def test_exponents_at_the_edges_of_what_is_counted_at_once(native: Slab, top: int, apart: int) -> None:
    """The first elements say which exponents are counted at once; later ones lie any distance below or above."""
    generator = np.random.default_rng([top + 149, apart])
    first = np.ldexp(generator.uniform(1, 2, 700), top)
    for other in (max(top - apart, -149), min(top + apart, 127)):
        second = np.ldexp(generator.uniform(1, 2, 700), other)
        mixed = np.where(generator.random(700) < 0.5, first, second)
        x = np.concatenate([first, second, mixed, first]).astype(np.float32)
        assert_bins(native, x)
        x[generator.integers(0, len(x), 5)] = [np.nan, -np.inf, 0, 1e-45, -1e-39]
        assert_bins(native, x)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 255, 256, 257, 319, 320, 511, 513, 575, 7935, 7937, 16385, 300_001])
def test_counters_are_read_out_before_they_overflow(native: Slab, size: int) -> None:
    x = np.full(size, 0.75, np.float32)
    assert_bins(native, x)
    x[::3] = -5e-7
    assert_bins(native, x)
    assert_bins(native, np.concatenate([np.zeros(600, np.float32), x, x * np.float32(1e20), x[:77]]))


def test_exponents_of_a_tensor_with_all_of_them(native: Slab) -> None:
    generator = np.random.default_rng(1)
    x = generator.integers(0, 1 << 32, 40_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    for size in (30, 1000, 40_000):
        assert_bins(native, x[:size])


@pytest.mark.parametrize("first", range(0, 255, 3))
def test_exponents_are_counted_wherever_the_first_ones_lie(native: Slab, first: int) -> None:
    """The first block places the windows; others lie below, above, on the edges, and in many windows at once."""
    generator = np.random.default_rng(first)
    parts = [np.full(generator.integers(1, 600), first)]
    for reach in (1, 24, 31, 60, 90, 254):
        length = generator.integers(1, 1100)
        parts.append(np.clip(first + generator.integers(-reach, reach + 1, length), 0, 255))
    stored = np.concatenate([*parts, *reversed(parts)]).astype(np.uint32)
    bits = (stored << 23) | generator.integers(0, 2, len(stored), np.uint32) << 31
    fractions = generator.integers(0, 1 << 23, len(stored), np.uint32) * (generator.random(len(stored)) < 0.9)
    x = (bits | fractions.astype(np.uint32)).view(np.float32)
    native.grow(3)
    native.observe(torch.from_numpy(x), 0)
    wide = torch.from_numpy(x).double().numpy()
    native.observe(torch.from_numpy(wide), 1)
    native.observe(torch.from_numpy(x[::3]), 2)
    _, bins = drain(native)
    np.testing.assert_array_equal(bins[0], expected_bins(wide))
    np.testing.assert_array_equal(bins[1], expected_bins(wide))
    np.testing.assert_array_equal(bins[2], expected_bins(wide[::3]))


@pytest.mark.parametrize("length", [15, 256, 7_936, 7_937, 500_000])
def test_exponents_of_an_update(native: Slab, length: int) -> None:
    generator = np.random.default_rng(length)
    new, old = generator.normal(size=(2, length)).astype(np.float32) * np.float32(1e-3)
    old[:: length // 7] = new[:: length // 7]
    native.grow(1)
    native.observe_update(torch.from_numpy(new), torch.from_numpy(old), 0)
    _, bins = drain(native)
    np.testing.assert_array_equal(bins[0], expected_bins((new - old).astype(np.float64)))
