"""Rows of a slab: kept apart, merged, drained and grown."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor

from retrograd.core.errors import RetrogradWarning
from retrograd.core.notices import Notices
from retrograd.core.statistics import slab as slabs
from retrograd.core.statistics.slab import NativeSlab, Slab, TorchSlab, UnreadableTensorError, make_slab, make_turns
from tests.core.statistics.oracle import assert_reads, assert_row, drain, elements, expected_bins


def test_make_slab_takes_the_compiled_kernel_for_the_cpu() -> None:
    assert isinstance(make_slab("cpu"), NativeSlab or TorchSlab)
    with pytest.raises(UnreadableTensorError, match="has no elements"):
        make_slab("meta")


def test_drain_gives_rows_in_use_in_order_and_empties_them(slab: Slab) -> None:
    slab.grow(5)
    tensors = {4: torch.randn(100), 1: torch.randn(3), 2: torch.empty(0)}
    for row, tensor in tensors.items():
        slab.observe(tensor, row)
    rows, bins = drain(slab)
    assert rows["row"].tolist() == [1, 2, 4]
    for row, line in zip(rows, bins, strict=True):
        assert_row(row, elements(tensors[row["row"]]))
        np.testing.assert_array_equal(line, expected_bins(elements(tensors[row["row"]])))
    assert slab.drain() == (b"", b"")
    assert_reads(slab, torch.ones(2))


def test_calls_merge(slab: Slab) -> None:
    slab.grow(1)
    tensors = [torch.randn(700) * 2.0**k + k for k in range(6)]
    for tensor in tensors:
        slab.observe(tensor, 0)
    rows, bins = drain(slab)
    everything = np.concatenate([elements(tensor) for tensor in tensors])
    assert_row(rows[0], everything, calls=6)
    np.testing.assert_array_equal(bins[0], expected_bins(everything))


def test_growing_keeps_what_there_is(slab: Slab) -> None:
    x = torch.randn(10)
    for n in (1, 1, 3, 2, 500):
        slab.grow(n)
        slab.observe(x, 0)
    assert len(slab) == 500
    slab.observe(x, 499)
    rows, _ = drain(slab)
    assert rows["calls"].tolist() == [5, 1]


def test_forget(slab: Slab) -> None:
    slab.grow(2)
    slab.observe(torch.ones(5), 1)
    slab.forget()
    assert slab.drain() == (b"", b"")
    slab.observe(torch.full((2,), -1.0), 1)
    rows, bins = drain(slab)
    assert_row(rows[0], np.array([-1.0, -1.0]))
    assert bins.sum() == 2


@pytest.mark.parametrize("row", [-1, 2, 10**6])
def test_no_such_row(slab: Slab, row: int) -> None:
    slab.grow(2)
    with pytest.raises(IndexError):
        slab.observe(torch.ones(1), row)
    with pytest.raises(IndexError):
        slab.observe_update(torch.ones(1), torch.ones(1), row)


def test_wrong_arguments(slab: Slab) -> None:
    slab.grow(1)
    with pytest.raises(TypeError):
        slab.observe(torch.ones(1))  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        slab.observe(torch.ones(1), "0")  # type: ignore[arg-type]
    with pytest.raises((TypeError, AttributeError)):
        slab.observe([1.0], 0)  # type: ignore[arg-type]
    assert slab.drain() == (b"", b"")


def test_observe_tells_whether_a_gradient_is_wanted(slab: Slab) -> None:
    slab.grow(1)
    assert slab.observe(torch.ones(1, requires_grad=True), 0) is True
    assert slab.observe(torch.ones(1), 0) is False
    assert slab.observe(torch.ones(1, dtype=torch.complex64, requires_grad=True), 0) is True


def test_nothing_is_added_to_the_graph(slab: Slab) -> None:
    slab.grow(1)
    for x in (torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, dtype=torch.complex64, requires_grad=True)):
        y = x * 2
        node, version = y.grad_fn, y._version
        slab.observe(y, 0)
        slab.observe(y.t(), 0)
        assert y.grad_fn is node
        assert y._version == version


@pytest.mark.parametrize("guard", [torch.inference_mode, torch.no_grad])
def test_grad_modes(slab: Slab, guard: type) -> None:
    with guard():
        slab.grow(1)
        slab.observe(torch.ones(10_000), 0)
    slab.observe(torch.ones(10_000, requires_grad=True), 0)
    with guard():
        slab.observe(torch.ones(10_000), 0)
        slab.grow(2)
    rows, _ = drain(slab)
    assert rows["count"].tolist() == [30_000]


def test_tensors_are_not_kept(slab: Slab) -> None:
    slab.grow(1)
    x = torch.randn(100, 100)
    watch = weakref.ref(x)
    slab.observe(x, 0)
    slab.observe_update(x, x, 0)
    gc.disable()
    try:
        del x
        assert watch() is None
    finally:
        gc.enable()


torch.manual_seed(0)  # one in a hundred means of thirty elements lies so far off that m2 is good to 1.1e-6 alone
UPDATES: dict[str, tuple[Tensor, Tensor]] = {
    "plain": (torch.randn(3000), torch.randn(3000)),
    "almost equal": ((old := torch.randn(3000)) * (1 + 1e-4), old),
    "two layouts": (torch.randn(30, 40).t(), torch.randn(40, 30)),
    "same odd layout": (torch.randn(30, 40)[:, ::3], torch.randn(30, 40)[:, ::3]),
    "expanded": (torch.randn(1).expand(30), torch.randn(1).expand(30)),
    "expanded and not": (torch.randn(1).expand(30), torch.randn(30)),
    "half": (torch.randn(700).bfloat16(), torch.randn(700).bfloat16()),
    "double": (torch.randn(700).double(), torch.randn(700).double()),
    "long": (torch.arange(700), torch.arange(700) * 3),
    "complex": (torch.randn(70, dtype=torch.complex64), torch.randn(70, dtype=torch.complex64).conj()),
    "not finite": (torch.tensor([1.0, float("inf"), 2.0]), torch.tensor([float("nan"), float("inf"), 3.0])),
    "empty": (torch.empty(0), torch.empty(0)),
    "scalar": (torch.tensor(2.0), torch.tensor(3.0)),
    "of a parameter": (torch.nn.Parameter(torch.randn(5, 6)), torch.randn(5, 6)),
}


@pytest.mark.parametrize("name", UPDATES)
def test_updates(slab: Slab, name: str) -> None:
    new, old = UPDATES[name]
    slab.grow(1)
    slab.observe_update(new, old, 0)
    rows, bins = drain(slab)
    with torch.no_grad():
        change = new.float() - old.float() if new.dtype is torch.bfloat16 else new - old
    assert_row(rows[0], elements(change))
    np.testing.assert_array_equal(bins[0], expected_bins(elements(change)))
    before = elements(old)
    reference = (before[np.isfinite(before)] ** 2).sum()
    np.testing.assert_allclose(rows[0]["reference"], reference, rtol=1e-6)


@pytest.mark.parametrize(
    ("new", "old"), [(torch.ones(3), torch.ones(4)), (torch.ones(3), torch.ones(3, dtype=torch.float64))]
)
def test_updates_of_unlike_tensors(slab: Slab, new: Tensor, old: Tensor) -> None:
    slab.grow(1)
    with pytest.raises(ValueError, match="one size and dtype"):
        slab.observe_update(new, old, 0)
    assert slab.drain() == (b"", b"")


def test_rows_are_numbered_in_the_order_in_which_they_are_first_reached(slab: Slab) -> None:
    slab.grow(6)
    for _ in range(2):
        for row in (4, 1, 4, 5, 1, 0):
            if row == 5:
                slab.observe_update(torch.ones(3), torch.zeros(3), row)
            else:
                slab.observe(torch.empty(0) if row == 1 else torch.ones(2), row)
        rows, _ = drain(slab)
        assert dict(zip(rows["row"].tolist(), rows["order"].tolist(), strict=True)) == {4: 0, 1: 1, 5: 2, 0: 3}
    slab.observe(torch.ones(2), 3)
    slab.forget()
    slab.observe(torch.ones(2), 2)
    assert drain(slab)[0]["order"].tolist() == [0]


def test_slabs_that_share_their_turns_are_one_order() -> None:
    turns = make_turns()
    first, second = make_slab("cpu", turns=turns), TorchSlab("cpu", turns=turns)
    for each in (first, second):
        each.grow(2)
    for each, row in ((first, 1), (second, 1), (second, 0), (first, 0), (second, 1)):
        each.observe(torch.ones(2), row)
    assert [drain(each)[0]["order"].tolist() for each in (first, second)] == [[3, 0], [2, 1]]


@pytest.mark.parametrize("turns", [b"12345678", bytearray(4), None, bytearray(16)], ids=str)
def test_the_kernel_refuses_what_cannot_count(turns: object) -> None:
    if NativeSlab is None:
        pytest.skip("the kernel is not compiled here")
    with pytest.raises((TypeError, ValueError, BufferError)):
        NativeSlab(True, torch.Tensor.clone, turns)  # type: ignore[arg-type]


def test_that_the_kernel_is_missing_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "NativeSlab", None)
    monkeypatch.setattr(slabs, "_notices", Notices())
    monkeypatch.setenv("RANK", "1")
    assert isinstance(make_slab("cpu"), TorchSlab)
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(RetrogradWarning, match="retrograd doctor") as said:
        make_slab("cpu")
        make_slab("cpu")
    assert len(said) == 1
