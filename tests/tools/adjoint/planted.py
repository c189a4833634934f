"""Layers with a fault in their backward, each beside the right one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


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


class Product(nn.Module):
    """a * b, whose backward may forget b."""

    def __init__(self, *, ignores_second: bool) -> None:
        super().__init__()

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
                ctx.save_for_backward(a, b)
                return a * b

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
                a, b = ctx.saved_tensors
                return gradient * b, torch.zeros_like(b) if ignores_second else gradient * a

        self.function = Function

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.function.apply(a, b)


class ComplexLinear(nn.Module):
    """A complex matrix, whose backward may forget to conjugate."""

    def __init__(self, *, conjugates: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4, dtype=torch.complex64))

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
                ctx.save_for_backward(x, weight)
                return x @ weight.T

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
                x, weight = ctx.saved_tensors
                if conjugates:
                    x, weight = x.conj(), weight.conj()
                return gradient @ weight, gradient.T @ x

        self.function = Function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.weight)


class PlainComplexLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class Squared(nn.Module):
    """x² by a Function that writes into what it has kept for its backward, behind autograd's back, if asked."""

    def __init__(self, *, overwrites: bool) -> None:
        super().__init__()

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                ctx.kept = x.clone()
                result = ctx.kept.square_() if overwrites else ctx.kept.square()
                return result.clone()

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                return 2 * ctx.kept * gradient

        self.function = Function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)


class TwoWays(nn.Module):
    """fc(x) + tanh(x), the second way cut by a detach if asked."""

    def __init__(self, *, is_cut: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.is_cut = is_cut

    def forward(self, x: Tensor) -> Tensor:
        way = x.detach() if self.is_cut else x
        return self.fc(x) + way.tanh()


class WithJvp(nn.Module):
    """exp, by a Function whose forward mode and backward share the same wrong factor, if asked."""

    def __init__(self, factor: float) -> None:
        super().__init__()

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                result = x.exp()
                ctx.save_for_backward(result)
                ctx.save_for_forward(result)
                return result

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                (result,) = ctx.saved_tensors
                return factor * gradient * result

            @staticmethod
            def jvp(ctx: Any, tangent: Tensor) -> Tensor:
                (result,) = ctx.saved_tensors
                return factor * tangent * result

        self.function = Function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)
