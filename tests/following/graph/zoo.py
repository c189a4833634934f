"""Graphs of many kinds. Each function makes tensors to begin a backward pass at, the same ones every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

Maker = Callable[[], tuple[list[Tensor], list[Tensor]]]
"""Makes where to begin, and all leaves."""

ZOO: dict[str, Maker] = {}


def in_zoo(maker: Maker) -> Maker:
    def seeded() -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        return maker()

    ZOO[maker.__name__] = seeded
    return seeded


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


@in_zoo
def mlp() -> tuple[list[Tensor], list[Tensor]]:
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Dropout(0.3), nn.Linear(7, 3), nn.LayerNorm(3))
    return [F.cross_entropy(net(torch.randn(6, 5)), torch.arange(6) % 3)], [*net.parameters()]


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y += x
        return self.act(y)


@in_zoo
def residual_conv_net() -> tuple[list[Tensor], list[Tensor]]:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), Residual(4), nn.MaxPool2d(2), Residual(4), nn.Flatten(), nn.Linear(36, 2))
    return [net(torch.randn(2, 3, 8, 8)).square().mean()], [*net.parameters()]


@in_zoo
def transformer() -> tuple[list[Tensor], list[Tensor]]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    x = leaf(2, 5, 8)
    return [layer(x).sin().sum()], [*layer.parameters(), x]


@in_zoo
def lstm_cell_of_40_steps() -> tuple[list[Tensor], list[Tensor]]:
    cell = nn.LSTMCell(4, 6)
    state = torch.zeros(3, 6), torch.zeros(3, 6)
    for _ in range(40):
        state = cell(torch.randn(3, 4), state)
    return [state[0].sum() + state[1].mean()], [*cell.parameters()]


@in_zoo
def complex_numbers() -> tuple[list[Tensor], list[Tensor]]:
    z, x = leaf(4, dtype=torch.complex64), leaf(4)
    return [((z * x).exp() * z.conj()).abs().sum(), torch.view_as_real(z * z).sum()], [z, x]


@in_zoo
def views_written_to() -> tuple[list[Tensor], list[Tensor]]:
    x, y = leaf(4, 4), leaf(4)
    base = x * 2
    base[1].mul_(y)
    base.view(16)[3:9].sin_()
    base.t()[0] = y.exp()
    return [base.pow(3).sum()], [x, y]


@in_zoo
def broadcast() -> tuple[list[Tensor], list[Tensor]]:
    leaves = [leaf(3, 1, 5), leaf(4, 1), leaf(), leaf(5)]
    a, b, c, d = leaves
    return [(a * b + c * d).tanh().sum()], leaves


@in_zoo
def mixed_dtypes() -> tuple[list[Tensor], list[Tensor]]:
    leaves = [leaf(3, 4), leaf(4, 2, dtype=torch.float64), leaf(2, dtype=torch.bfloat16), leaf(2, dtype=torch.float16)]
    a, b, c, d = leaves
    return [(a.double() @ b * c + d).sum()], leaves


@in_zoo
def autocast() -> tuple[list[Tensor], list[Tensor]]:
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    with torch.autocast("cpu", torch.bfloat16):
        return [net(torch.randn(5, 4)).float().square().sum()], [*net.parameters()]


@in_zoo
def nodes_of_many_outputs() -> tuple[list[Tensor], list[Tensor]]:
    x = leaf(4, 3)
    first, _, third, _ = (x * 2).unbind()
    left, right = (x + 1).split([1, 2], dim=1)
    u, s, _ = torch.linalg.svd(x)
    return [(first * third).sum() + left.prod() + right.exp().sum(), s.sum() + u.abs().sum()], [x]


@in_zoo
def unused_branches() -> tuple[list[Tensor], list[Tensor]]:
    x, unused = leaf(3), leaf(3)
    _ = (x * unused).exp()
    return [torch.where(x > 0, x, unused.detach() * x).sum()], [x]


@in_zoo
def shared_parameters() -> tuple[list[Tensor], list[Tensor]]:
    table = nn.Embedding(7, 4)
    hidden = table(torch.tensor([1, 2, 2, 6])).tanh()
    return [F.cross_entropy(F.linear(hidden, table.weight), torch.tensor([2, 2, 6, 0]))], [table.weight]


@in_zoo
def sparse_gradient_meets_dense() -> tuple[list[Tensor], list[Tensor]]:
    weight = leaf(7, 4)
    rows = torch.tensor([1, 2, 2])
    return [F.embedding(rows, weight, sparse=True).sum() + (weight * weight).sum()], [weight]


@in_zoo
def sparse_gradient() -> tuple[list[Tensor], list[Tensor]]:
    weight = leaf(7, 4)
    return [F.embedding(torch.tensor([1, 2, 2]), weight, sparse=True).exp().sum()], [weight]


class Scale(Function):
    """Takes arguments that are no tensors, and gives two results."""

    @staticmethod
    def forward(ctx: Any, name: str, x: Tensor, factor: float, bias: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor + bias, x.sin()

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        first, second = incoming
        (x,) = ctx.saved_tensors
        return None, first * ctx.factor + second * x.cos(), None, first


class AsksForNone(Function):
    """Wants to know which gradients are undefined."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        first, second = incoming
        return None if first is None else first * 2 if second is None else first * 2 + second * 3


class Rounds(Function):
    """One of its results has no derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        whole = x.round().long()
        ctx.mark_non_differentiable(whole)
        return x - whole, whole

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        return incoming[0], None, None  # more than it took: torch allows Nones


class DoublesInPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        return incoming[0] * 2


@in_zoo
def python_functions() -> tuple[list[Tensor], list[Tensor]]:
    x, bias = leaf(4), leaf(4)
    first, second = Scale.apply("a", x * 1, 3.0, bias)
    third, _ = Scale.apply("b", second, 2.0, bias.detach())
    fourth, _ = AsksForNone.apply(third)
    _, fifth = AsksForNone.apply(third)
    sixth, whole = Rounds.apply(x * 5)
    seventh = DoublesInPlace.apply(x + 1)
    eighth = x.sinh()
    eighth[1:] = DoublesInPlace.apply(eighth[1:])
    return [(first * fourth + fifth + sixth * whole + seventh + eighth).sum()], [x, bias]


def checkpointed(use_reentrant: bool) -> tuple[list[Tensor], list[Tensor]]:
    first, inner, outer = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def again(x: Tensor) -> Tensor:
        return F.dropout(inner(x).tanh(), 0.3) * checkpoint(inner, x, use_reentrant=use_reentrant)

    x = checkpoint(again, first(torch.randn(2, 3)), use_reentrant=use_reentrant)
    leaves = [*first.parameters(), *inner.parameters(), *outer.parameters()]
    return [outer(x + inner(x)).sum()], leaves


@in_zoo
def checkpoint_that_is_reentrant() -> tuple[list[Tensor], list[Tensor]]:
    return checkpointed(use_reentrant=True)


@in_zoo
def checkpoint_that_is_not_reentrant() -> tuple[list[Tensor], list[Tensor]]:
    return checkpointed(use_reentrant=False)


@in_zoo
def roots_that_lead_to_each_other() -> tuple[list[Tensor], list[Tensor]]:
    x = leaf(3)
    y = x.exp()
    z = (y * y).sin()
    return [y.sum(), z.sum(), (z * y).sum()], [x]


@in_zoo
def nested_tensors() -> tuple[list[Tensor], list[Tensor]]:
    a, b, weight = leaf(2, 3), leaf(4, 3), leaf(3, 3)
    both = torch.nested.as_nested_tensor([a, b], layout=torch.jagged)
    return [(both @ weight).sin().values().sum()], [a, b, weight]


@in_zoo
def not_finite() -> tuple[list[Tensor], list[Tensor]]:
    x = torch.tensor([0.0, -1.0, 2.0, float("inf")], requires_grad=True)
    return [(x.sqrt() * 0 + x.log()).sum()], [x]


@in_zoo
def saved_on_the_cpu() -> tuple[list[Tensor], list[Tensor]]:
    x = leaf(4)
    with torch.autograd.graph.save_on_cpu():
        return [(x.exp() * x.sin()).sum()], [x]
