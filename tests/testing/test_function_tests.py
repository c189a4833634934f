"""The contract of a Function: good ones pass it, and each test finds the fault that it is there for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from retrograd.testing.function_tests import FunctionTests
from retrograd.tools.functions.function import Function


class Square(Function):
    def forward(self, ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor]:
        return {"x": 2 * ctx.saved_tensors[0] * grad_output}


class Damped(Square):
    """Halves what is larger than the last one."""

    def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor]:
        past = self.remembered["grad_output"]
        self.remember("grad_output", grad_output * (len(past) + 1))
        scale = 0.5 ** len(past)
        return super().backward(ctx, grad_output * scale)


class Owning(Square):
    def __init__(self) -> None:
        self.x = nn.Parameter(torch.ones(2, dtype=torch.float64))


class Once(Square):
    @once_differentiable
    def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor]:
        return super().backward(ctx, grad_output)


class Wrong(Square):
    def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor]:
        return {"x": 3 * ctx.saved_tensors[0] * grad_output}


class WrongTwice(Square):
    def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor]:
        return {"x": 2 * ctx.saved_tensors[0].detach() * grad_output}


class Forgets(Square):
    """Counts on an attribute that no checkpoint has."""

    def __init__(self) -> None:
        self.passes = 0

    def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor]:
        self.passes += 1
        return super().backward(ctx, grad_output / self.passes)


class Hoards(Square):
    def forward(self, ctx: Any, x: Tensor) -> Tensor:
        self.ctx = ctx
        return super().forward(ctx, x)


SHARED: list[int] = []


class Shares(Square):
    """Its state is global, as with static methods."""

    def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor]:
        SHARED.append(1)
        return super().backward(ctx, grad_output / len(SHARED))


class SquareTests(FunctionTests):
    kind: type[Function] = Square

    def make_function(self) -> Function:
        return self.kind()

    def make_arguments(self) -> Sequence[Any]:
        return [torch.tensor([0.5, -2.0], dtype=torch.float64, requires_grad=True)]


class TestSquare(SquareTests):
    pass


class TestDamped(SquareTests):
    kind = Damped


class TestOwning(SquareTests):
    kind = Owning


class TestOnce(SquareTests):
    kind = Once
    is_differentiable_twice = False


@pytest.mark.parametrize(
    ("fault", "test", "told"),
    [
        (Wrong, "its_gradients_are_those_of_finite_differences", "Jacobian mismatch"),
        (WrongTwice, "its_second_derivatives_are_those_of_finite_differences", "Jacobian mismatch"),
        (Forgets, "it_goes_on_alike_after_a_checkpoint", "has other gradients"),
        (Hoards, "it_keeps_no_graph", "is held after its backward pass"),
        (Shares, "a_copy_goes_on_alike", "has other gradients"),
    ],
)
def test_a_fault_is_found(fault: type[Function], test: str, told: str) -> None:
    tests = SquareTests()
    tests.kind = fault
    with pytest.raises((AssertionError, RuntimeError), match=told):
        getattr(tests, f"test_{test}")()
