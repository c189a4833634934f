"""Pieces of a forward pass: views of all kinds, checkpoints, and what has no graph."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.memory.saved.program_pieces import WIDTH, Parts, dense, piece, rows

# ---- views ----------------------------------------------------------------------------------------------------


@piece()
def chunks(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    first, second = x.chunk(2, 1)
    return torch.cat([first * second, second.exp().clamp(max=4)], 1)


@piece()
def transposed(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return (rows(x).transpose(1, 2) * rows(y).transpose(1, 2)).transpose(1, 2).flatten(1)


@piece(layer=lambda: nn.Linear(4, 4))
def transposed_product(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return self.layer(rows(x).mT).mT.flatten(1)


@piece()
def expanded(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return x[:1].expand_as(y) * y + x[:, :1].expand(-1, WIDTH).sigmoid()


@piece()
def strided(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return (x[:, ::2] * y[:, 1::2]).repeat_interleave(2, 1)


@piece()
def overlapping(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    windows = x.unfold(1, 4, 4)[:, :, 1:].as_strided((len(x), 6, 4), (x.stride(0), 4, 1))
    return F.pad(windows.tanh().flatten(1), (0, 8))


@piece()
def small_part(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    """Of a storage of 100 rows only a few are saved."""
    table = torch.linspace(0, 1, 100 * WIDTH, dtype=x.dtype).view(100, WIDTH)
    return x * table[40:41] + y[:1, 3:4] * x.exp().clamp(max=2)


@piece()
def flipped(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return x.flip(1) * y.roll(3, 1)


@piece()
def empty_part(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x[:0].tanh(), x.tanh()]) + y[:0].exp().sum()


@piece()
def unbound(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    first, *rest = rows(x).unbind(1)
    return torch.stack([first.tanh(), *(each * first for each in rest)], 1).flatten(1)


@piece(layer=dense)
def unsafe_chunks(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    """Parts that share memory, but not the counter of writes."""
    first, second = self.layer(x).unsafe_chunk(2, 1)
    return torch.cat([first.sigmoid_(), second.tanh_()], 1) * y


# ---- checkpoints, and what has no graph -----------------------------------------------------------------------


@piece(layer=dense)
def checkpointed(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return checkpoint(lambda x: F.dropout(self.layer(x).tanh(), 0.2), x, use_reentrant=False)


@piece(layer=dense)
def reentrant(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return checkpoint(lambda x: F.dropout(self.layer(x).tanh(), 0.2), x, use_reentrant=True)


@piece()
def detached(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return x * x.detach().sigmoid() + y.detach()


@piece()
def scale_without_graph(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        scale = y.abs().mean(0).add_(1)
    return x / scale


@piece(layer=dense)
def unused_branch(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    self.layer(x).exp().tanh()
    return x.sin()


@piece(layer=dense)
def mixed_precision(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.gelu(self.layer(self.layer(x)) @ y.mT.to(x.dtype) @ y).to(x.dtype)
