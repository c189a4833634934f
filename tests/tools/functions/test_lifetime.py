"""Nothing is kept alive: without the garbage collector, graph, ctx and saved tensors go with the last reference."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from retrograd.tools.functions.call import Auxiliary
from retrograd.tools.functions.function import Function


@pytest.fixture(autouse=True, scope="module")
def no_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Marker:
    """Lives as long as ``ctx`` does."""


class Watched(Function):
    """Leaves weak references to all that one call makes."""

    def __init__(self, breaks: str = "") -> None:
        self.breaks = breaks
        self.made: list[weakref.ref[Any]] = []

    def forward(self, ctx: Any, x: Tensor) -> tuple[Any, ...]:
        inner = x.exp()
        ctx.save_for_backward(x, inner)
        extra = inner * 2
        ctx.marker = Marker()
        self.made += [weakref.ref(ctx), weakref.ref(ctx.marker), weakref.ref(inner), weakref.ref(extra)]
        self.remember("inner", inner, last=2)
        if self.breaks == "forward":
            raise ZeroDivisionError
        return inner * 1, Auxiliary(extra)

    def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor]:
        _, inner = ctx.saved_tensors
        self.made.append(weakref.ref(grad_output))
        self.remember("grad_output", grad_output, last=2)
        if self.breaks == "backward":
            raise ZeroDivisionError
        return {"x": grad_output * inner}

    def alive(self) -> int:
        return sum(reference() is not None for reference in self.made)


def test_a_call_without_backward_goes_with_its_output() -> None:
    function = Watched()
    output, extra = function(torch.ones(3, requires_grad=True))
    assert function.alive() >= 3
    del output, extra
    assert function.alive() == 0


@pytest.mark.parametrize("create_graph", [False, True])
def test_everything_goes_after_a_backward_pass(create_graph: bool) -> None:
    function, x = Watched(), torch.ones(3, requires_grad=True)
    output, extra = function(x)
    (gradient,) = torch.autograd.grad((output * 2).sum(), x, create_graph=create_graph)
    inner = function.made[2]
    del output, extra, gradient
    assert inner() is None
    assert function.alive() == 0
    assert len(function.remembered["grad_output"]) == 1


def test_saved_tensors_go_as_soon_as_the_pass_is_over() -> None:
    function, x = Watched(), torch.ones(3, requires_grad=True)
    output, _ = function(x)
    inner = function.made[2]
    assert inner() is not None
    output.sum().backward()
    assert inner() is None  # though the output and its node are still held
    assert output.grad_fn is not None


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_everything_goes_after_an_exception(place: str) -> None:
    function = Watched(breaks=place)

    def run() -> None:
        output, _ = function(torch.ones(3, requires_grad=True))
        output.sum().backward()

    try:
        run()
    except ZeroDivisionError:
        pass
    else:
        pytest.fail("nothing was raised")
    assert function.alive() == 0


def test_an_instance_goes_with_its_last_call_and_its_last_holder() -> None:
    function = Watched()
    reference = weakref.ref(function)
    output, _ = function(torch.ones(3, requires_grad=True))
    del function
    assert reference() is not None  # its backward is still to come
    output.sum().backward()
    del output, _
    assert reference() is None


def test_a_long_chain_of_calls_is_freed() -> None:
    class Twice(Function):
        def forward(self, ctx: Any, x: Tensor) -> Tensor:
            return x + 0

        def backward(self, ctx: Any, grad_output: Tensor) -> Tensor:
            return grad_output

    twice = Twice()
    x = torch.ones((), requires_grad=True)
    output = x
    for _ in range(20_000):
        output = twice(output)
    first = weakref.ref(output.grad_fn)
    output.backward()
    assert x.grad is not None
    assert float(x.grad) == 1.0
    del output
    assert first() is None


def test_the_history_is_bounded() -> None:
    function, kept = Watched(), []
    for _ in range(5):
        output, _extra = function(torch.ones(3, requires_grad=True))
        output.sum().backward()
        kept += [weakref.ref(tensor) for tensor in function.remembered["grad_output"]]
    del output, _extra
    assert len(function.remembered["grad_output"]) == 2
    assert sum(reference() is not None for reference in kept[:-2]) <= 1
