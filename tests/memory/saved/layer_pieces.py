"""Pieces of a forward pass: layers, activations, and random numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.memory.saved.program_pieces import WIDTH, Parts, dense, images, piece, rows, square

# ---- layers ---------------------------------------------------------------------------------------------------


@piece(layer=dense)
def linear(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return self.layer(x)


@piece(layer=lambda: nn.Conv2d(2, 2, 3, padding=1))
def conv(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return self.layer(images(x)).flatten(1)


@piece(layer=lambda: nn.Conv2d(2, 2, 3, padding=1), norm=lambda: nn.BatchNorm2d(2))
def channels_last(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    self.layer.to(memory_format=torch.channels_last)
    return self.norm(self.layer(images(x).contiguous(memory_format=torch.channels_last))).relu_().flatten(1)


@piece(norm=lambda: nn.BatchNorm2d(2))
def batch_norm(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return self.norm(images(x)).flatten(1)


@piece(norm=lambda: nn.BatchNorm2d(2, momentum=None))
def batch_norm_of_average(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return self.norm(images(x)).relu().flatten(1)


@piece(norm=lambda: nn.LayerNorm(WIDTH))
def layer_norm(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return self.norm(x)


@piece(norm=lambda: nn.GroupNorm(2, 2))
def group_norm(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return self.norm(images(x)).flatten(1)


@piece(norm=lambda: nn.RMSNorm(WIDTH))
def rms_norm(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return self.norm(x)


@piece(layer=lambda: nn.LSTM(8, 8, batch_first=True))
def lstm(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return self.layer(rows(x))[0].flatten(1)


@piece(layer=lambda: nn.GRUCell(WIDTH, WIDTH))
def gru_cell(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    for _ in range(2):
        y = self.layer(x, y.to(x.dtype))
    return y


@piece(layer=lambda: nn.Embedding(8, WIDTH))
def embedding(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return x * self.layer((x.detach()[:, 0] * 4).long().remainder(8))


@piece(layer=lambda: nn.Embedding(8, 8, padding_idx=0))
def embedding_of_slices(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    tokens = torch.arange(len(x) * 8, device=x.device).remainder(8).view(-1, 8)[:, ::2]
    return self.layer(tokens).flatten(1) * x


@piece(layer=lambda: nn.PReLU())
def prelu(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return self.layer(x)


@piece(weight=square)
def normed_weight(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return F.linear(x, self.weight / self.weight.norm(dim=1, keepdim=True))


@piece(layer=dense)
def transposed_weight(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return F.linear(x, self.layer.weight.t()) + F.linear(x[:, ::2], self.layer.weight[:, 1::2])


@piece(layer=dense)
def layer_twice(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return self.layer(self.layer(x).tanh())


# ---- activations ----------------------------------------------------------------------------------------------


@piece()
def relu(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return x.relu()


@piece(layer=dense, act=lambda: nn.ReLU(inplace=True))
def relu_in_place(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return self.act(self.layer(x))


@piece(act=lambda: nn.ReLU(inplace=True))
def relu_into_x(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return self.act(x)


@piece()
def gelu(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return F.gelu(x)


@piece()
def tanh_sigmoid(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return x.tanh() * y.sigmoid()


@piece()
def softmax(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return rows(x).softmax(-1).flatten(1) - rows(y).log_softmax(1).flatten(1)


@piece(q=dense)
def attention(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    q, k = rows(self.q(x)), rows(y).to(x.dtype)
    return ((q @ k.mT).softmax(-1) @ k).flatten(1)


@piece(qkv=lambda: nn.Linear(8, 24))
def fused_attention(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(rows(x)).chunk(3, -1))
    mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if self.training else 0.0)
    return mixed.transpose(1, 2).flatten(1)


@piece()
def max_pool(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    pooled, where = F.max_pool2d(images(x), 2, return_indices=True)
    return F.max_unpool2d(pooled, where, [2]).flatten(1)


@piece()
def average_and_upsample(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return F.interpolate(F.avg_pool2d(images(x), 2), scale_factor=2, mode="bilinear").flatten(1)


# ---- random numbers -------------------------------------------------------------------------------------------


@piece(layer=lambda: nn.Dropout(0.3))
def dropout(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return self.layer(x)


@piece(layer=dense)
def dropout_in_place(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return F.dropout(self.layer(x), 0.5, self.training, inplace=True)


@piece()
def noise(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return x * torch.rand_like(x) + y * torch.randn(WIDTH).to(y.dtype)


@piece()
def bernoulli(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return x * torch.empty_like(x).bernoulli_(0.5) * torch.bernoulli(y.detach().sigmoid())


@piece()
def permutation(self: Parts, x: Tensor, y: Tensor) -> Tensor:
    return x[:, torch.randperm(WIDTH)].sigmoid() * y[torch.randperm(len(y))]
