"""The code that is written out for a plain Function: torch's own Functions are the oracle."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from retrograd.core.hooks import functions
from retrograd.core.hooks.functions import inner_apply
from retrograd.core.hooks.nonfinite import source_of
from retrograd.tools.functions import written_out
from retrograd.tools.functions.function import Function
from tests import warm
from tests.tools.functions.linear import MyLinear, PlainLinear, tensors


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Any) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return 2 * grad_output * ctx.saved_tensors[0], None


def square_that_returns(arrange: Callable[[Tensor], Any]) -> Function:
    class Square(Function):
        def forward(self, ctx: Any, x: Tensor, factor: Any) -> Tensor:
            ctx.save_for_backward(x)
            return x.square()

        def backward(self, ctx: Any, grad_output: Tensor) -> Any:
            return arrange(2 * grad_output * ctx.saved_tensors[0])

    return Square()


class Dictionary(dict[str, Any]):
    """Another kind of dict."""


@pytest.mark.parametrize(
    "arrange",
    [
        lambda g: {"x": g, "factor": None},
        lambda g: {"factor": None, "x": g},
        lambda g: {"x": g},
        lambda g: Dictionary(x=g),
        lambda g: (g, None),
        lambda g: (g, None, None),
        lambda g: {"x": (g / 2).expand(2, 3)},  # which torch sums to the shape of x
    ],
)
@pytest.mark.parametrize("factor", [3.0, None, "a", [1], torch.ones(3)])
def test_gradients_in_any_form(arrange: Callable[[Tensor], Any], factor: Any) -> None:
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (ours,) = torch.autograd.grad(square_that_returns(arrange)(x, factor).sum(), x)
    (theirs,) = torch.autograd.grad(Plain.apply(x, factor).sum(), x)
    assert torch.equal(ours, theirs)


def test_a_tensor_that_a_transform_left_behind_is_what_it_stood_for() -> None:
    left: list[Tensor] = []

    def leave(x: Tensor) -> Tensor:
        left.append(x)
        return x.sum()

    torch.func.grad(leave)(torch.ones(4, 3, dtype=torch.float64))
    (dead,) = left
    _, weight, bias = tensors()
    ours, theirs = MyLinear()(dead, weight, bias), PlainLinear.apply(dead, weight, bias)
    assert torch.equal(ours, theirs)
    assert not torch._C._functorch.is_functorch_wrapped_tensor(ours)
    ours.sum().backward()
    assert torch.equal(weight.grad, torch.full((2, 3), 4.0, dtype=torch.float64))  # type: ignore[arg-type]


@pytest.mark.parametrize("is_compiled", [False, True], ids=["a frame in Python", "compiled"])
def test_either_apply_of_torch(monkeypatch: pytest.MonkeyPatch, is_compiled: bool) -> None:
    if is_compiled:
        monkeypatch.setattr(written_out, "inner_apply", lambda function: None)

    class Linear(MyLinear):
        pass

    arguments = tensors()
    ours, theirs = Linear()(*arguments), PlainLinear.apply(*arguments)
    incoming = torch.randn_like(ours)
    for one, other in zip(
        torch.autograd.grad(ours, arguments, incoming), torch.autograd.grad(theirs, arguments, incoming), strict=True
    ):
        assert torch.equal(one, other)


def test_an_apply_of_a_node_that_does_more_than_is_known_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    node, calls = torch.autograd.function.BackwardCFunction, list[Any]()
    original = node.apply

    def apply(self: Any, *args: Any) -> Any:
        calls.append(self)
        return original(self, *args)

    monkeypatch.setattr(node, "apply", apply)

    class Linear(MyLinear):
        pass

    arguments = tensors()
    gradients = torch.autograd.grad(Linear()(*arguments).sum(), arguments)
    assert len(calls) == 1
    assert all(map(torch.equal, gradients, torch.autograd.grad(PlainLinear.apply(*arguments).sum(), arguments)))


def test_an_apply_of_a_function_that_does_more_than_is_known_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PlainLinear.apply

    def apply(cls: Any, *args: Any) -> Any:
        return original(*args)

    assert not apply.__code__.co_names, "what is around it is not found by names alone"
    monkeypatch.setattr(functions, "APPLY", apply.__code__)
    assert inner_apply(PlainLinear) is None


@pytest.mark.parametrize(
    "name",
    [
        "_C._are_functorch_transforms_active",
        "_C._functorch.unwrap_if_dead",
        "autograd.Function.needs_input_grad",
        "autograd.Function._backward_cls",
    ],
)
def test_a_torch_without_one_of_its_private_names(name: str) -> None:
    words = [sys.executable, "-m", "tests.tools.functions.without_a_name", name]
    warm.run(words, check=True, timeout=120, cwd=Path(__file__).parents[3], stage="torch")


def test_needs_input_grad_is_of_the_arguments_and_can_be_set() -> None:
    seen = []

    class Sets(Function):
        def forward(self, ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            seen.append(ctx.needs_input_grad)
            ctx.needs_input_grad = (True, True)
            return x + y

        def backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
            seen.append((ctx.needs_input_grad, ctx.needs_grad))
            return grad_output, grad_output

    x = torch.ones(3, requires_grad=True)
    Sets()(x, torch.ones(3)).sum().backward()
    assert seen == [(True, False), ((True, True), {"x": True, "y": True})]


def test_the_source_of_its_backward_is_the_method() -> None:
    code = MyLinear.backward.__code__
    assert source_of(MyLinear()(*tensors()).grad_fn) == f"{code.co_filename}:{code.co_firstlineno}"


def test_one_frame_lies_between_the_engine_and_the_method() -> None:
    frames = []

    class Looks(Function):
        def forward(self, ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        def backward(self, ctx: Any, grad_output: Tensor) -> Tensor:
            frames.append(sys._getframe(1).f_code.co_name)
            frames.append(sys._getframe(2).f_code.co_name)
            return grad_output

    Looks()(torch.ones(3, requires_grad=True)).sum().backward()
    assert frames == ["backward", "_engine_run_backward"]
