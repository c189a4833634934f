"""Layers with a fault in their backward, each beside the right one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.by_hand import make_function


class LinearFunction(torch.autograd.Function):
    """x Wᵀ + b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T + bias

    @classmethod
    def right(cls, ctx: Any, gradient: Tensor) -> list[Tensor | None]:
        x, weight = ctx.saved_tensors
        return [gradient @ weight, gradient.T @ x, gradient.sum(0)]


def linear(fault: str) -> nn.Module:
    """A linear layer of its own Function; the fault is that of its backward."""

    class Function(LinearFunction):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
            _, weight = ctx.saved_tensors
            x_grad, weight_grad, bias_grad = LinearFunction.right(ctx, gradient)
            match fault:
                case "transposed weight":
                    x_grad = gradient @ weight.T
                case "missing factor":
                    weight_grad = 0.5 * weight_grad
                case "flipped sign":
                    x_grad = -x_grad
                case "ignored bias":
                    bias_grad = None
                case "missing sum over the batch":
                    bias_grad = gradient[0]
                case "mean over the batch":
                    bias_grad = gradient.mean(0)
                case "transposed gradient":
                    weight_grad = weight_grad.T
                case "wrong in one element":
                    weight_grad = weight_grad.clone()
                    weight_grad[0, 0] += 1e-3
            return x_grad, weight_grad, bias_grad

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))
            self.bias = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            return Function.apply(x, self.weight, self.bias)

    return Layer()


def saving(result: Callable[..., Tensor], backward: Callable[..., Any], name: str = "Odd") -> Callable[..., Tensor]:
    """A Function that saves its arguments; its backward is given them behind the gradient."""

    def forward(ctx: Any, *args: Tensor) -> Tensor:
        ctx.save_for_backward(*args)
        return result(*args)

    return make_function(forward, lambda ctx, gradient: backward(gradient, *ctx.saved_tensors), name).apply


class Applied(nn.Module):
    """A function as a module, which may have a weight behind its argument."""

    def __init__(self, function: Callable[..., Any], weight: Tensor | None = None) -> None:
        super().__init__()
        self.function = function
        self.weight = None if weight is None else nn.Parameter(weight)

    def forward(self, x: Tensor) -> Any:
        return self.function(x) if self.weight is None else self.function(x, self.weight)


def product(*, ignores_second: bool) -> Callable[..., Tensor]:
    """a * b, whose backward may forget b."""
    return saving(
        lambda a, b: a * b, lambda gradient, a, b: (gradient * b, gradient * a * (not ignores_second)), "Product"
    )


def complex_linear(*, conjugates: bool) -> nn.Module:
    """A complex matrix, whose backward may forget to conjugate."""

    def backward(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = (x.conj(), weight.conj()) if conjugates else (x, weight)
        return gradient @ weight, gradient.T @ x

    return Applied(saving(lambda x, weight: x @ weight.T, backward), torch.randn(5, 4, dtype=torch.complex64))


def squared(*, overwrites: bool) -> Callable[..., Tensor]:
    """x² by a Function that writes into what it has kept for its backward, behind autograd's back, if asked."""

    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = x.clone()
        return (ctx.kept.square_() if overwrites else ctx.kept.square()).clone()

    return make_function(forward, lambda ctx, gradient: 2 * ctx.kept * gradient).apply


class TwoWays(nn.Module):
    """fc(x) + tanh(x), the second way cut by a detach if asked."""

    def __init__(self, *, is_cut: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.is_cut = is_cut

    def forward(self, x: Tensor) -> Tensor:
        way = x.detach() if self.is_cut else x
        return self.fc(x) + way.tanh()


def with_jvp(factor: float) -> Callable[..., Tensor]:
    """exp, by a Function whose forward mode and backward share the same wrong factor, if asked."""

    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.exp()
        ctx.save_for_backward(result)
        ctx.save_for_forward(result)
        return result

    def scale(ctx: Any, given: Tensor) -> Tensor:
        return factor * given * ctx.saved_tensors[0]

    function = make_function(forward, scale)
    function.jvp = staticmethod(scale)
    return function.apply
