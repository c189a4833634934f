"""Tensors that have no elements to read are refused with the reason, and nothing crashes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from retrograd.core.statistics.slab import Slab, UnreadableTensorError
from tests.core.statistics.oracle import assert_reads


class Wrapper(torch.Tensor):
    """A tensor that decides itself what its elements are."""

    @staticmethod
    def __new__(cls) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError("nothing may be computed with it")


def make_fake() -> Tensor:
    with FakeTensorMode():
        return torch.randn(3)


def make_freed(offset: int = 0) -> Tensor:
    x = torch.randn(1000)[offset:]
    x.untyped_storage().resize_(0)
    return x


def make_shrunk() -> Tensor:
    x = torch.randn(1000)
    x.untyped_storage().resize_(8)
    return x[1:]


def make_nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


UNREADABLE: dict[str, Callable[[], Tensor]] = {
    "meta": lambda: torch.randn(3, device="meta"),
    "fake": make_fake,
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8),
    "nested": make_nested,
    "freed": make_freed,
    "freed, from the middle": lambda: make_freed(500),
    "wrapper subclass": Wrapper,
    "bits": lambda: torch.ones(4, dtype=torch.uint8).view(torch.bits8),
    "uint64": lambda: torch.ones(4, dtype=torch.uint8).to(torch.uint64),
}


@pytest.mark.filterwarnings("ignore:.*(quantize|nested|Nested|TypedStorage).*")
@pytest.mark.parametrize("kind", UNREADABLE)
def test_unreadable(slab: Slab, kind: str) -> None:
    slab.grow(1)
    tensor = UNREADABLE[kind]()
    with pytest.raises(UnreadableTensorError, match=r".{10}"):
        slab.observe(tensor, 0)
    with pytest.raises(UnreadableTensorError):
        slab.observe_update(torch.ones(3), tensor, 0)
    assert slab.drain() == (b"", b"")
    assert_reads(slab, torch.randn(10))


def test_zeros_without_memory(slab: Slab) -> None:
    assert_reads(slab, torch._efficientzerotensor(3, 4))


def test_inside_vmap_and_grad(slab: Slab) -> None:
    slab.grow(1)
    reasons = []

    def f(x: Tensor) -> Tensor:
        try:
            slab.observe(x, 0)
        except UnreadableTensorError as error:
            reasons.append(str(error))
        return (x * x).sum()

    torch.func.vmap(f)(torch.randn(4, 3))
    torch.func.grad(f)(torch.randn(3))
    torch.func.vmap(torch.func.grad(f))(torch.randn(4, 3))
    torch.func.jvp(f, (torch.randn(3),), (torch.randn(3),))
    assert len(reasons) == 4
    assert all("torch.func" in reason for reason in reasons)
    assert slab.drain() == (b"", b"")


def test_functionalized(slab: Slab) -> None:
    slab.grow(1)
    reasons = []

    def f(x: Tensor) -> Tensor:
        try:
            slab.observe(x, 0)
        except UnreadableTensorError as error:
            reasons.append(str(error))
        return x + 1

    torch.func.functionalize(f)(torch.randn(3))
    assert len(reasons) == 1
