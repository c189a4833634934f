"""One operation of many kinds each: what a replay bundle has to cope with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from tests.following.graph.zoo import leaf

D = torch.float64
C = torch.complex128


class Cube(Function):
    """Keeps a tensor the right way, one on its context, and one in a closure of its module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.three = torch.full((), 3.0)
        return x**3

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        (x,) = ctx.saved_tensors
        return incoming[0] * ctx.three * x.pow(2) * _ONES[: len(x)]


_ONES = torch.ones(10, dtype=D)


class Branches(Function):
    """Reads a number out of the gradient, tries something, and draws."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        (gradient,) = incoming
        factor = gradient.abs().max().item()
        try:
            gradient.mm(torch.ones(7, 7))
        except RuntimeError:
            factor += 1
        return gradient * factor + torch.randn(gradient.shape, dtype=gradient.dtype)


class UsesAutograd(Function):
    """Runs the engine itself, as many Functions do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(x.sin(), x, incoming[0])


class WritesToItsBuffer(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor) -> Tensor:
        ctx.buffer = buffer
        return x * 2

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        ctx.buffer.add_(incoming[0])
        return incoming[0] * ctx.buffer, None


def in_place_on_a_view() -> Tensor:
    base = leaf(4, 4, dtype=D) * 2
    base[1:3, ::2].mul_(leaf(2, 2, dtype=D))
    return base


def batch_norm(training: bool) -> Tensor:
    mean, variance = torch.zeros(3, dtype=D), torch.ones(3, dtype=D)
    weight, bias = leaf(3, dtype=D), leaf(3, dtype=D)
    return F.batch_norm(leaf(5, 3, 4, dtype=D), mean, variance, weight, bias, training=training)


def recurrent(kind: Any) -> Tensor:
    torch.manual_seed(0)
    result: Tensor = kind(3, 4, num_layers=2)(leaf(5, 2, 3))[0]
    return result


KINDS: dict[str, Callable[[], Any]] = {
    "addmm": lambda: F.linear(leaf(3, 4), leaf(5, 4), leaf(5)),
    "addmm, half": lambda: F.linear(leaf(3, 4, dtype=torch.bfloat16), leaf(5, 4, dtype=torch.bfloat16)),
    "batched product of transposed": lambda: leaf(2, 4, 3).mT @ leaf(2, 4, 5),
    "einsum": lambda: torch.einsum("bij,bjk->ik", leaf(2, 3, 4), leaf(2, 4, 5)),
    "convolution": lambda: F.conv2d(leaf(2, 3, 8, 8), leaf(4, 3, 3, 3), leaf(4), padding=1),
    "convolution, channels last": lambda: F.conv2d(
        leaf(2, 3, 8, 8).to(memory_format=torch.channels_last), leaf(4, 3, 3, 3)
    ),
    "transposed convolution": lambda: F.conv_transpose1d(leaf(2, 3, 8), leaf(3, 4, 3), stride=2),
    "layer norm": lambda: F.layer_norm(leaf(3, 4), (4,), leaf(4), leaf(4)),
    "group norm": lambda: F.group_norm(leaf(2, 6, 5), 3, leaf(6)),
    "batch norm": lambda: batch_norm(training=True),
    "batch norm, evaluated": lambda: batch_norm(training=False),
    "softmax": lambda: F.softmax(leaf(3, 4), 1),
    "log softmax and loss": lambda: F.cross_entropy(leaf(3, 4), torch.tensor([1, -100, 3]), label_smoothing=0.1),
    "attention": lambda: F.scaled_dot_product_attention(leaf(2, 2, 5, 8), leaf(2, 2, 5, 8), leaf(2, 2, 5, 8)),
    "attention, causal": lambda: F.scaled_dot_product_attention(
        leaf(2, 2, 5, 8), leaf(2, 2, 5, 8), leaf(2, 2, 5, 8), is_causal=True
    ),
    "embedding": lambda: F.embedding(torch.tensor([1, 2, 2]), leaf(7, 4), padding_idx=1),
    "embedding, sparse": lambda: F.embedding(torch.tensor([1, 2, 2]), leaf(7, 4), sparse=True),
    "max pool": lambda: F.max_pool2d(leaf(2, 3, 8, 8), 2),
    "average pool": lambda: F.adaptive_avg_pool2d(leaf(2, 3, 8, 8), 3),
    "interpolate": lambda: F.interpolate(leaf(1, 2, 4, 4), scale_factor=2, mode="bilinear"),
    "dropout": lambda: F.dropout(leaf(20), 0.5),
    "LSTM": lambda: recurrent(torch.nn.LSTM),
    "GRU": lambda: recurrent(torch.nn.GRU),
    "LSTM cell": lambda: torch.nn.LSTMCell(3, 4)(leaf(2, 3))[0],
    "index put": lambda: leaf(5, 3).index_put((torch.tensor([0, 2, 2]),), leaf(3, 3), accumulate=True),
    "gather and scatter": lambda: (
        leaf(4, 3).scatter(0, torch.tensor([[2, 1, 0]]), leaf(1, 3)).gather(1, torch.tensor([[0, 0], [1, 2]]))
    ),
    "in place on a view": in_place_on_a_view,
    "views": lambda: leaf(4, 6).t().reshape(3, 8)[1:, ::2].expand(2, 2, 4).flip(0),
    "as_strided": lambda: torch.as_strided(leaf(10), (3, 4), (2, 1), 1),
    "unfold": lambda: leaf(10).unfold(0, 4, 2),
    "complex product": lambda: leaf(3, dtype=C) * leaf(3, dtype=C).conj(),
    "imaginary part of a product": lambda: (leaf(3, dtype=C) @ leaf(3, 3, dtype=C).mH).imag,
    "fourier": lambda: torch.fft.rfft(leaf(9)).abs(),
    "cumprod with a zero": lambda: (leaf(5, dtype=D) * torch.tensor([1.0, 0, 1, 1, 0], dtype=D)).cumprod(0),
    "svd": lambda: torch.linalg.svd(leaf(4, 3, dtype=D), full_matrices=False),
    "eigh": lambda: torch.linalg.eigh(leaf(4, 4, dtype=D)),
    "cholesky": lambda: torch.linalg.cholesky(torch.eye(3, dtype=D) + leaf(3, 3, dtype=D) * 0.01),
    "determinant": lambda: torch.linalg.slogdet(leaf(3, 3, dtype=D))[1],
    "where, clamp, minimum": lambda: torch.where(leaf(5) > 0, leaf(5), leaf(5).clamp(0, 1)).minimum(leaf(5)),
    "not finite": lambda: (leaf(3) * torch.tensor([0.0, float("inf"), float("nan")])).sqrt(),
    "sort and topk": lambda: leaf(4, 5).sort(1)[0].topk(2, 1)[0],
    "sparse product": lambda: torch.sparse.mm(torch.eye(3).to_sparse(), leaf(3, 4)),
    "nothing in it": lambda: leaf(0, 4).softmax(1) @ leaf(4, 3),
    "Function": lambda: Cube.apply(leaf(4, dtype=D)),
    "Function that branches": lambda: Branches.apply(leaf(2, 3, dtype=D)),
    "Function that uses autograd": lambda: UsesAutograd.apply(leaf(3, dtype=D)),
    "Function that writes": lambda: WritesToItsBuffer.apply(leaf(3, dtype=D), torch.ones(3, dtype=D)),
}
"""Name → makes tensors to begin a backward pass at."""
