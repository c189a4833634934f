"""The same linear layer three times: by us, by a ``torch.autograd.Function`` written by hand, and by torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from retrograd.tools.functions.function import Function


class MyLinear(Function):
    def forward(self, ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor | None]:
        x, weight = ctx.saved_tensors
        return {
            "x": grad_output @ weight,
            "weight": grad_output.T @ x,
            "bias": grad_output.sum(0) if ctx.needs_grad["bias"] else None,
        }


class RememberingLinear(MyLinear):
    def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor | None]:
        self.remember("grad_output", grad_output, last=3)
        return super().backward(ctx, grad_output)


class PlainLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        bias = grad_output.sum(0) if ctx.needs_input_grad[2] else None
        return grad_output @ weight, grad_output.T @ x, bias


def tensors(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Input [4, 3], weight [2, 3] and bias [2], all leaves that require grad."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((4, 3), (2, 3), (2,))
    x, weight, bias = (torch.randn(s, generator=generator, dtype=dtype, requires_grad=True) for s in shapes)
    return x, weight, bias
