"""Small nets with the shapes of trouble, and the hook by hand that all features are held against."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_map


@dataclass
class Answer:
    logits: Tensor
    parts: dict[str, Tensor]


register_pytree_node(Answer, lambda it: ([it.logits, it.parts], None), lambda children, _: Answer(*children))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 3)

    def forward(self, states: Tensor, scale: float = 1.0) -> Answer:
        logits = self.fc(states) * scale
        return Answer(logits, {"first": logits[:, :1], "rest": logits[:, 1:]})


class Net(nn.Module):
    """In-place layers, a residual in place, a nested output of each kind, and a cell that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.mix = nn.Conv2d(4, 4, 3, padding=1)
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.cell = nn.Linear(5, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)])
        self.unused = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.5)
        self.head = Head()

    def forward(self, images: Tensor) -> Answer:
        x = self.relu(self.norm(self.stem(images)))
        mixed = self.mix(x)
        mixed += x
        states, _ = self.lstm(mixed.flatten(2).transpose(1, 2))
        y = states[:, -1]
        for _ in range(3):
            y = self.cell(y).tanh_()
        for block in self.blocks:
            y = block(y)
        return self.head(self.drop(y), scale=2.0)


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def make_images(count: int = 2) -> Tensor:
    return torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(1))


def hook_by_hand(model: nn.Module, path: str, *args: Any, call: int = 1, grad: bool = False, **kwargs: Any) -> Any:
    """A copy of what a module returns in one of its calls, from a forward hook and a forward to the end.

    With grad some layers of torch run other code, whose last bits differ.
    """
    seen: list[Any] = []

    def see(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(
            tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else copy.copy(leaf), output)
        )

    with torch.set_grad_enabled(grad):
        handle = model.get_submodule(path).register_forward_hook(see)
        try:
            model(*args, **kwargs)
        finally:
            handle.remove()
    return seen[call - 1]
