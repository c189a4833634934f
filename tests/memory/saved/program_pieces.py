"""What pieces of a forward pass are: each is given two tensors of shape ``(batch, 32)`` and returns another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 32
IMAGE = (2, 4, 4)
SEQUENCE = (4, 8)

Parts = Any
"""The module of a piece, with its layers as attributes."""
Forward = Callable[[Parts, Tensor, Tensor], Any]
Makers = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Piece:
    """A piece.

    Attributes:
        forward: given its module, the value made last and another one; returns the next.
        makers: make its layers, parameters and buffers.
    """

    forward: Forward
    makers: Makers


def piece(**makers: Callable[[], Any]) -> Callable[[Forward], Piece]:
    """Make a piece of a function."""
    return lambda forward: Piece(forward, makers)


def collect_pieces(*modules: ModuleType) -> dict[str, Piece]:
    """Those of some modules, by name."""
    return {name: value for module in modules for name, value in vars(module).items() if isinstance(value, Piece)}


class Applied(nn.Module):
    """A piece as a module of its own."""

    def __init__(self, piece: Piece) -> None:
        super().__init__()
        self.piece = piece
        for name, make in piece.makers.items():
            part = make()
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.piece.forward(self, x, y)


def dense() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def square() -> Tensor:
    return nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)


def images(x: Tensor) -> Tensor:
    return x.reshape(len(x), *IMAGE)


def rows(x: Tensor) -> Tensor:
    return x.reshape(len(x), *SEQUENCE)
