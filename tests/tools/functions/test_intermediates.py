"""A Function that keeps what its forward computes, differentiated twice: against the derivative by plain autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import retrograd as rg
from retrograd.core.errors import FunctionError


class Cube(rg.Function):
    def forward(self, ctx: Any, x: Tensor) -> Tensor:
        square = x * x
        ctx.save_for_backward(square)
        return square * x

    def backward(self, ctx: Any, gradient: Tensor) -> dict[str, Tensor]:
        (square,) = ctx.saved_tensors
        return {"x": 3 * square * gradient}


class ByAttribute(rg.Function):
    def forward(self, ctx: Any, x: Tensor, *, power: int = 3) -> Tensor:
        buffer = torch.empty_like(x)
        buffer[:] = x * x
        ctx.square = buffer
        return buffer * x

    def backward(self, ctx: Any, gradient: Tensor) -> Any:
        return 3 * ctx.square * gradient, None


class Inside(rg.Function):
    def forward(self, ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = {"squares": [x * x]}
        return ctx.kept["squares"][0] * x

    def backward(self, ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * ctx.kept["squares"][0] * gradient


class WithX(rg.Function):
    """Half of what its backward takes has a graph."""

    def forward(self, ctx: Any, x: Tensor) -> Tensor:
        square = x * x
        ctx.save_for_backward(x, square)
        return square * x

    def backward(self, ctx: Any, gradient: Tensor) -> dict[str, Tensor]:
        x, square = ctx.saved_tensors
        return {"x": (x * x + 2 * square) * gradient}


class Returned(rg.Function):
    """As torch advises: what backward needs is a further output."""

    def forward(self, ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        square = x * x
        ctx.save_for_backward(x, square)
        return square * x, square

    def backward(self, ctx: Any, gradient: Tensor, of_square: Tensor) -> Tensor:
        x, square = ctx.saved_tensors
        return 3 * square * gradient + 2 * x * of_square


class Masked(rg.Function):
    """x³ where a mask of zeros and ones, which is drawn, lets it."""

    def forward(self, ctx: Any, x: Tensor) -> Tensor:
        mask = (torch.rand_like(x) > 0.5).to(x.dtype)
        scale = torch.ones_like(x) * 2
        ctx.save_for_backward(x, mask, scale, x.sign())
        ctx.half = x.round().detach()
        return x**3 * mask * scale

    def backward(self, ctx: Any, gradient: Tensor) -> Tensor:
        x, mask, scale, _ = ctx.saved_tensors
        return 3 * x**2 * mask * scale * gradient


class Once(Cube):
    @once_differentiable
    def backward(self, ctx: Any, gradient: Tensor) -> dict[str, Tensor]:
        (square,) = ctx.saved_tensors
        return {"x": 3 * square * gradient}


def second(function: Any, x: Tensor) -> Tensor:
    (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    (found,) = torch.autograd.grad((first * first).sum(), x)
    return found


X = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


KEEPING = [
    (Cube, r"ctx.saved_tensors\[0\]"),
    (ByAttribute, "ctx.square"),
    (WithX, r"ctx.saved_tensors\[1\]"),
    (Inside, r"ctx.kept\[squares\]\[0\]"),
]


@pytest.mark.parametrize(("make", "kept"), KEEPING)
def test_a_second_derivative_that_would_lack_a_part_is_refused(make: type[rg.Function], kept: str) -> None:
    x, function = X.clone().requires_grad_(), make()
    for _ in range(2):
        function(x).sum().backward()
    assert torch.equal(x.grad, 6 * X**2)  # type: ignore[arg-type]
    said = f"{make.__name__} is differentiated twice, and keeps {kept}"
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        with pytest.raises(FunctionError, match=said):
            (first * first).sum().backward()
        (first,) = torch.autograd.grad((scale * function(x)).sum(), x, create_graph=True)
        (of_scale,) = torch.autograd.grad(first.sum(), scale)  # nothing is lost on the way to it
        assert torch.equal(of_scale, (3 * X**2).sum())


@pytest.mark.parametrize("make", [Cube, ByAttribute])
def test_a_graph_of_gradients_that_nobody_differentiates_is_let_be(make: type[rg.Function]) -> None:
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(make()(x).sum(), x, create_graph=True)
    assert torch.equal(first, 3 * X**2)


def test_one_that_returns_it_too_has_the_right_derivative() -> None:
    function = Returned()
    x, plain = X.clone().requires_grad_(), X.clone().requires_grad_()
    assert torch.allclose(second(lambda x: function(x)[0], x), second(lambda x: x**3, plain))


def test_what_is_drawn_or_has_no_derivative_is_no_intermediate() -> None:
    function = Masked()
    for _ in range(2):
        x, plain = X.clone().requires_grad_(), X.clone().requires_grad_()
        torch.manual_seed(0)
        found = second(function, x)
        torch.manual_seed(0)
        mask = (torch.rand_like(plain) > 0.5).to(plain.dtype)
        assert torch.allclose(found, second(lambda x, mask=mask: 2 * x**3 * mask, plain))


def test_what_torch_refuses_itself_it_still_does() -> None:
    x, scale = X.clone().requires_grad_(), torch.ones((), requires_grad=True)
    (first,) = torch.autograd.grad((scale * Once()(x)).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_a_first_call_without_gradients_decides_nothing() -> None:
    function = Cube()
    with torch.no_grad():
        function(X)
    function(X)
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    with pytest.raises(FunctionError, match="Cube is differentiated twice"):
        first.sum().backward()


@pytest.mark.parametrize(("make", "kept"), KEEPING)
def test_it_is_refused_where_the_derivative_is_asked_for_alone(make: type[rg.Function], kept: str) -> None:
    """The engine runs what leads to the tensors that are asked for; by plain autograd the second derivative is 6 x."""
    function = make()
    for _ in range(2):
        with pytest.raises(FunctionError, match=kept):
            torch.autograd.functional.hessian(lambda x: function(x).sum(), X)
        x = X.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(2 * x).sum() + x.square().sum(), x, create_graph=True)
        assert torch.equal(first, 24 * X**2 + 2 * X)
        with pytest.raises(FunctionError, match=kept):
            torch.autograd.grad(first.sum(), x, retain_graph=True)
        with pytest.raises(FunctionError, match=kept):
            first.sum().backward()


def test_a_derivative_of_complex_numbers_is_refused_too() -> None:
    z = torch.tensor([1.0 + 2.0j], requires_grad=True)
    (first,) = torch.autograd.grad(Cube()(z).real.sum(), z, create_graph=True)
    with pytest.raises(FunctionError, match="Cube is differentiated twice"):
        torch.autograd.grad(first.real.sum(), z)
