"""Pieces of a forward pass: writes in place, buffers, indices, custom Functions, and other numbers than float32.

What writes into ``x`` itself makes programs that cannot be trained, when something has saved it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tests.memory.saved.program_pieces import WIDTH, Parts, dense, piece, rows, square

# ---- writes in place ------------------------------------------------------------------------------------------


@piece()
def add_into_x(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return x.add_(y)


@piece()
def scale_x(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return x.mul_(0.5)


@piece()
def write_a_part_of_x(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    x[:, ::2] = y[:, 1::2].to(x.dtype)
    return x


@piece()
def chain_on_a_clone(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return x.clone().add_(y, alpha=0.5).mul_(0.5).clamp_(max=1).exp_()


@piece()
def write_views(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    z = x * 1
    z[:, :8].add_(y[:, 8:16]).mul_(2)
    rows(z).transpose(1, 2)[:, 1:3].tanh_()
    return z


@piece(a=dense, b=dense)
def filled_buffer(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    """Slices of one piece of memory are saved, before and after other slices are written."""
    buffer = torch.zeros(len(x), 2 * WIDTH, dtype=x.dtype)
    buffer[:, :WIDTH].copy_(self.a(x))
    half = buffer[:, :WIDTH].clone()
    buffer[:, WIDTH:] = self.b(y)
    return buffer[:, 16:48] * half + buffer[:, ::2]


@piece()
def write_between_savings(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    """Legal: what is saved before the write is saved of a clone."""
    z = x * 2
    first = z.clone().tanh()
    z.add_(y)
    return first * z.sigmoid()


@piece()
def written_without_graph(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    z = x + 0.5
    with torch.no_grad():
        z.clamp_(-1, 1).mul_(y)
    return z * y


@piece()
def copied_back(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    z = torch.empty_like(y)
    z.copy_(x)
    return z.sigmoid() + torch.empty_strided(x.shape, (1, len(x)), dtype=x.dtype).copy_(y).tanh()


@piece()
def foreach(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    parts = torch._foreach_mul([x, y.to(x.dtype)], 0.5)
    torch._foreach_add_(parts, 1.0)
    return parts[0] * parts[1]


@piece()
def write_without_counting(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    """Torch does not count it, and it is done before anything is saved."""
    z = x * 2
    z.data.add_(0.25)
    return z * z


# ---- buffers --------------------------------------------------------------------------------------------------


@piece(running=lambda: torch.zeros(WIDTH))
def running_mean(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    centred = x - self.running
    self.running.mul_(0.9).add_(0.1 * x.detach().float().mean(0))
    return centred


@piece(scale=lambda: torch.ones(WIDTH), count=lambda: torch.zeros((), dtype=torch.long))
def saved_buffer(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    """The buffer is saved, and replaced after that."""
    self.count += 1
    scaled = x * self.scale
    self.scale = self.scale + 0.01 * y.detach().float().mean(0)
    return scaled


# ---- indices --------------------------------------------------------------------------------------------------


@piece()
def sort(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    values, order = x.sort(1)
    return values * y.gather(1, order)


@piece()
def scatter(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    order = y.detach().argsort(1)
    return torch.zeros_like(x).scatter(1, order, x).exp().clamp(max=3)


@piece()
def masks(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    mask = x > y
    return torch.where(mask, x, y.to(x.dtype)).masked_fill(mask.flip(1), 0.5) * x


@piece()
def masked_parts(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    mask = y.detach() > 0
    return x.tanh().masked_scatter(mask, x[mask].sin())


@piece()
def indexed_write(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z[:, [1, 5, 5]] = y[:, :3].exp().clamp(max=2).to(x.dtype)
    return z.index_add(1, torch.tensor([0, 0, 3]), y[:, 4:7].to(x.dtype)).cos()


@piece()
def extremes(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    values, _ = rows(x).max(2, keepdim=True)
    return (rows(x) - values).flatten(1) * x.topk(4, 1).values.sum(1, keepdim=True) + x.cummax(1).values


@piece()
def accumulated(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return x.cumsum(1).tanh() * rows(y).logsumexp(2).repeat(1, 8)


# ---- custom Functions -----------------------------------------------------------------------------------------


class Product(Function):
    """Saves inputs, an output, and what is neither."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        inner = x.tanh()
        result = inner * y
        ctx.save_for_backward(x, y, inner, result)
        ctx.kept = inner
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y, inner, result = ctx.saved_tensors
        return grad * y * (1 - x.tanh() * ctx.kept) + 0 * result, grad * inner


class Doubled(Function):
    """Writes into its input, and saves what it was."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.clone())
        ctx.mark_dirty(x)
        return x.mul_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@piece()
def product_function(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return Product.apply(x, y.to(x.dtype))  # type: ignore[no-untyped-call]


@piece()
def dirty_function(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return Doubled.apply(x * 0.5) + y  # type: ignore[no-untyped-call]


# ---- other numbers --------------------------------------------------------------------------------------------


@piece(weight=square)
def complex_numbers(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    z = torch.complex(x[:, :16].float(), x[:, 16:].float())
    weight = torch.view_as_complex(self.weight.view(-1, 16, 2))[:16]
    return torch.view_as_real((z.conj() @ weight).conj() * z).flatten(1).to(x.dtype)


@piece()
def fourier(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    z = torch.fft.fft(x.float() * y.float()).conj()
    return (z.imag.neg() * z.real / WIDTH).to(x.dtype)


@piece()
def doubles(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return (x.double().pow(2) * y.half()).sqrt().add(1e-3).log1p().to(x.dtype)


@piece()
def scalars(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return x * x.mean() * torch.tensor(1.5, dtype=torch.float64) + y * y.std().clamp(max=2)


@piece(weight=square)
def einsum(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("bi,ij,bj->bj", x, self.weight.to(x.dtype), y.to(x.dtype)) + F.normalize(x, dim=1)
