from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.rewriting.memory.memory import Memory

numbers = st.one_of(st.floats(-1e6, 1e6), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 3.4e38, -3.4e38, 1e-30]))
streams = st.lists(numbers, max_size=30)


def finite(stream: list[float]) -> np.ndarray:
    return np.array([x for x in stream if math.isfinite(x)], np.float64)


def same(ours: torch.Tensor, expected: float, size: float) -> None:
    np.testing.assert_allclose(float(ours), expected, rtol=1e-5, atol=1e-6 * size + 1e-37)


@settings(deadline=None)
@given(streams)
def test_the_mean_is_that_of_the_finite_numbers(stream: list[float]) -> None:
    memory = Memory()
    assert math.isnan(memory.mean("x").value)
    for x in stream:
        memory.mean("x").add(torch.tensor(x))
    kept = finite(stream)
    assert memory.mean("x").count == len(kept)
    same(memory.mean("x").value, kept.mean() if len(kept) else math.nan, np.abs(kept).max(initial=0))


@settings(deadline=None)
@given(streams, st.sampled_from([0.0, 0.5, 0.98]))
def test_the_average_is_a_weighted_mean_of_the_finite_numbers(stream: list[float], decay: float) -> None:
    memory = Memory()
    assert memory.ema("x", decay).is_new
    assert math.isnan(memory.ema("x", decay).value)
    for x in stream:
        memory.ema("x", decay).add(torch.tensor(x, dtype=torch.float64))
    kept = finite(stream)
    weights = decay ** np.arange(len(kept))[::-1]
    expected = (weights * kept).sum() / weights.sum() if len(kept) else math.nan
    assert memory.ema("x", decay).count == len(kept)
    same(memory.ema("x", decay).value, expected, np.abs(kept).max(initial=0))


def test_an_average_may_begin_at_a_value() -> None:
    ema, expected = Memory().ema("x", 0.9), 5.0
    ema.start(5.0)
    assert not ema.is_new
    for x in (1.0, math.nan, 2.0):
        ema.add(x)
        expected = expected if math.isnan(x) else 0.9 * expected + 0.1 * x
    same(ema.value, expected, 1)
    ema.start(torch.tensor(math.nan))
    assert math.isnan(ema.value)
    ema.add(3.0)
    same(ema.value, 3.0, 1)


@settings(deadline=None)
@given(streams, st.sampled_from([1, 2, 5, 8, None]), st.floats(0, 1))
def test_a_window_holds_the_last_finite_numbers(stream: list[float], size: int | None, q: float) -> None:
    memory = Memory()
    assert math.isnan(memory.window("x", size).quantile(q))
    for x in stream:
        memory.window("x", size).add(torch.tensor(x, dtype=torch.float64))
    window, kept = memory.window("x", size), finite(stream)
    kept = kept if size is None else kept[-size:]
    scale = np.abs(kept).max(initial=0)
    assert window.count == len(kept)
    same(window.mean, kept.mean() if len(kept) else math.nan, scale)
    same(window.std, kept.std(ddof=1) if len(kept) > 1 else math.nan, scale)
    same(window.variance, kept.var() if len(kept) else math.nan, scale**2)
    same(window.quantile(q), np.quantile(kept, q) if len(kept) else math.nan, scale)
    same(window.value, np.median(kept) if len(kept) else math.nan, scale)


def test_the_whole_past_grows() -> None:
    memory, generator = Memory(), np.random.default_rng(0)
    past = generator.standard_normal(1000)
    for x in past:
        memory.window("x", None).add(x)
    assert memory.window("x", None).count == 1000
    same(memory.window("x", None).quantile(0.9), float(np.quantile(past, 0.9)), 1)


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.int8],
)
def test_types_are_wide_enough_to_add_for_long(dtype: torch.dtype) -> None:
    memory = Memory()
    xs = [torch.tensor([value, value + 1], dtype=torch.float64).to(dtype) for value in (1, 2, 4)]
    for x in xs:
        memory.mean("x").add(x)
        memory.ema("x", 0.5).add(x)
    wide = torch.stack([x.to(torch.complex128 if dtype.is_complex else torch.float64) for x in xs])
    for value in (memory.mean("x").value, memory.ema("x", 0.5).value):
        assert value.dtype == {torch.float64: torch.float64, torch.complex64: torch.complex64}.get(
            dtype, torch.complex128 if dtype.is_complex else torch.float32
        )
    torch.testing.assert_close(memory.mean("x").value.to(wide.dtype), wide.mean(0), rtol=1e-6, atol=0)
    weights = torch.tensor([1.0, 2, 4], dtype=torch.float64)[:, None] / 7
    torch.testing.assert_close(memory.ema("x", 0.5).value.to(wide.dtype), (weights * wide).sum(0), rtol=1e-6, atol=0)


def test_elements_of_tensors_are_counted_one_by_one() -> None:
    memory = Memory()
    for x in ([1.0, math.nan, math.inf], [3.0, 4.0, -math.inf]):
        memory.mean("x").add(torch.tensor(x))
        memory.ema("x", 0.5).add(torch.tensor(x))
    assert memory.mean("x").count.tolist() == [2, 1, 0]
    torch.testing.assert_close(memory.mean("x").value, torch.tensor([2.0, 4.0, math.nan]), equal_nan=True)
    torch.testing.assert_close(memory.ema("x", 0.5).value, torch.tensor([7 / 3, 4.0, math.nan]), equal_nan=True)


def test_empty_tensors() -> None:
    memory = Memory()
    memory.mean("x").add(torch.empty(0, 3))
    memory.ema("x", 0.5).add(torch.empty(0, 3))
    assert memory.mean("x").value.shape == memory.ema("x", 0.5).value.shape == (0, 3)


def test_no_graph_is_held() -> None:
    memory, leaf, saved = Memory(), torch.ones(3, requires_grad=True), torch.ones(3)
    x = leaf * saved
    fill(memory, x.sum())
    memory.last("tensor", 2).add(x)
    memory.put("raw", x)
    tensors = [*flat(memory.state_dict()), *memory.last("tensor", 2), memory.get("raw"), memory.mean("x").value]
    assert not any(tensor.requires_grad for tensor in tensors)
    graph = weakref.ref(saved)
    gc.disable()
    try:
        del saved
        assert graph() is not None
        del x
        assert graph() is None
    finally:
        gc.enable()


def fill(memory: Memory, x: Any) -> None:
    memory.mean("x").add(x)
    memory.ema("x", 0.9).add(x)
    memory.window("x", 3).add(x)
    memory.window("past", None).add(x)
    memory.put("times", memory.get("times", 0) + 1)


def flat(saved: dict[str, Any]) -> list[torch.Tensor]:
    listed = [one for kept in saved.values() for one in (kept if isinstance(kept, tuple) else (kept,))]
    return [tensor for tensor in listed if isinstance(tensor, torch.Tensor)]


def read(memory: Memory) -> list[float]:
    window, past = memory.window("x", 3), memory.window("past", None)
    values = (memory.mean("x").value, memory.ema("x", 0.9).value, window.quantile(0.3), window.std, past.quantile(0.7))
    return [float(value) for value in values] + [memory.get("times")]


def through_a_file(memory: Memory) -> Memory:
    file = io.BytesIO()
    torch.save(memory.state_dict(), file)
    file.seek(0)
    loaded = Memory()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    return loaded


@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, lambda memory: pickle.loads(pickle.dumps(memory)), through_a_file],
    ids=["copy", "pickle", "file"],
)
def test_a_copy_goes_on_alike_and_apart(again: Callable[[Memory], Memory]) -> None:
    memory = Memory()
    for x in (1.0, 5.0, 2.0, 8.0):
        fill(memory, torch.tensor(x))
    memory.last("tensor", 2).add(torch.ones(2))
    other = again(memory)
    before = read(memory)
    assert read(other) == before
    assert torch.equal(other.last("tensor", 2)[-1], torch.ones(2))
    fill(other, torch.tensor(100.0))
    assert read(memory) == before != read(other)
    fill(memory, torch.tensor(100.0))
    assert read(memory) == read(other)


def test_a_snapshot_is_a_way_back_and_copies_nothing() -> None:
    memory = Memory()
    for x in (1.0, 5.0):
        fill(memory, torch.tensor(x))
    memory.last("tensor", 2).add(torch.ones(2))
    before, snapshot = read(memory), memory.snapshot()
    addresses = [tensor.data_ptr() for tensor in flat(dict(snapshot))]
    fill(memory, torch.tensor(9.0))
    memory.last("tensor", 2).add(torch.zeros(2))
    assert [tensor.data_ptr() for tensor in flat(dict(snapshot))] == addresses
    memory.restore(snapshot)
    assert read(memory) == before
    assert len(memory.last("tensor", 2)) == 1
    assert [tensor.data_ptr() for tensor in flat(dict(memory.snapshot()))] == addresses


def test_the_last_tensors_are_held_by_reference() -> None:
    memory, xs = Memory(), [torch.full((2,), float(n)) for n in range(5)]
    for x in xs:
        memory.last("x", 3).add(x)
    last = memory.last("x", 3)
    assert [tensor.data_ptr() for tensor in last] == [x.data_ptr() for x in xs[-3:]]
    assert torch.equal(last[-1], xs[-1])
    assert [float(tensor[0]) for tensor in last[:2]] == [2, 3]
    assert len(memory.last("x", 2)) == 2
    assert float(memory.last("x", 2)[0][0]) == 3
    gone = weakref.ref(xs[0].untyped_storage())
    del xs, x
    assert gone() is None
    with pytest.raises(IndexError):
        memory.last("y", 3)[-1]


def test_a_copied_tensor_is_safe_from_who_writes_into_it() -> None:
    memory, x = Memory(), torch.zeros(2)
    memory.last("by reference", 1).add(x)
    memory.last("copied", 1).add(x, copy=True)
    x += 1
    assert memory.last("by reference", 1)[-1].tolist() == [1, 1]
    assert memory.last("copied", 1)[-1].tolist() == [0, 0]


def test_what_is_seen_in_inference_may_be_trained_with() -> None:
    memory = Memory()
    with torch.inference_mode():
        fill(memory, torch.tensor(3.0))
        memory.last("x", 2).add(torch.ones(2))
    leaf = torch.ones(2, requires_grad=True)
    (leaf * leaf * memory.ema("x", 0.9).value * memory.last("x", 2)[-1]).sum().backward()
    torch.testing.assert_close(leaf.grad, torch.full((2,), 6.0))


@pytest.mark.parametrize("grad", [True, False])
def test_nothing_depends_on_grad_mode(grad: bool) -> None:
    memory, other = Memory(), Memory()
    for x in (1.0, 2.0, 7.0):
        fill(other, torch.tensor(x))
        with torch.set_grad_enabled(grad):
            fill(memory, torch.tensor(x, requires_grad=True) * 1)
    assert read(memory) == read(other)


def test_names_of_different_kinds_do_not_meet() -> None:
    memory = Memory()
    memory.put("x", 7)
    fill(memory, torch.tensor(2.0))
    memory.last("x", 1).add(torch.zeros(1))
    assert memory.get("x") == 7
    assert float(memory.mean("x").value) == 2
    assert "x" in memory
    assert "y" not in memory
    memory.forget("x")
    memory.forget("x")
    assert "x" not in memory
    assert memory.get("x", "nothing") == "nothing"


def test_numbers_enter_as_well() -> None:
    memory = Memory()
    for x in (1.0, 2.0, math.nan):
        fill(memory, x)
    assert read(memory)[0] == 1.5
    assert memory.window("past", None).count == 2


@pytest.mark.parametrize(
    "wrong",
    [
        lambda memory: memory.mean("x").add(torch.ones(3)),
        lambda memory: memory.ema("x", 0.9).add(torch.ones(3)),
        lambda memory: memory.window("x", 3).add(torch.ones(3)),
        lambda memory: memory.window("x", 3).add(torch.tensor(1j)),
        lambda memory: memory.window("x", 4).add(1.0),
        lambda memory: memory.window("x", 0),
        lambda memory: memory.window("x", 3).quantile(90),
        lambda memory: memory.ema("x", 1.0),
        lambda memory: memory.last("x", 0),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: Callable[[Memory], object]) -> None:
    memory = Memory()
    fill(memory, torch.ones(()))
    fill(memory, torch.ones(()))
    before = read(memory)
    with pytest.raises(ValueError, match=r"'x|quantile"):
        wrong(memory)
    assert read(memory) == before


def test_adding_never_waits_for_the_device() -> None:
    """On the meta device there is nothing to wait for: whatever would read a number raises."""
    memory = Memory()
    fill(memory, torch.empty((), device="meta"))
    fill(memory, torch.empty((), device="meta"))
    assert memory.window("x", 3).quantile(0.5).is_meta
    assert memory.window("past", None).std.is_meta
    assert memory.ema("x", 0.9).value.is_meta
    assert memory.mean("x").value.is_meta


def test_what_is_loaded_moves_to_the_device_of_what_comes() -> None:
    memory, loaded = Memory(), Memory()
    fill(memory, torch.tensor(1.0))
    memory.put("raw", torch.ones(2))
    loaded.load_state_dict(memory.state_dict())
    fill(loaded, torch.empty((), device="meta"))
    assert all(tensor.is_meta for tensor in flat({**loaded.state_dict(), "raw": 0}))
    assert loaded.get("raw", device=torch.device("meta")).is_meta
