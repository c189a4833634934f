"""What the code of a model shows of how often a module is called; where there is doubt, nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from retrograd.tools.features.called_once import is_called_once


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.relu = nn.Linear(2, 2), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.fc(self.relu(x)))


class Named(nn.Sequential):
    pass


class Net(nn.Module):
    """Calls its parts in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.helped, self.repeated, self.looped = (nn.Linear(2, 2) for _ in range(4))
        self.handed, self.either, self.inner, self.twice = (nn.Linear(2, 2) for _ in range(4))
        self.layers, self.named = nn.Sequential(nn.Linear(2, 2), Block()), Named(nn.Linear(2, 2))
        self.blocks, self.pairs = nn.ModuleList([Block(), Block()]), nn.ModuleList([Block()])
        self.counted, self.row = nn.ModuleList([nn.Linear(2, 2)]), nn.Sequential(nn.Linear(2, 2))

    def help(self, x: Tensor) -> Tensor:
        return self.helped(x)

    def repeat(self, x: Tensor) -> Tensor:
        return self.repeated(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.help(self.stem(x))
        x = self.named(self.layers(self.repeat(self.repeat(x))))
        for _ in range(2):
            x = self.looped(x)
        for block in self.blocks:
            x = block(x)
        for pair in self.pairs:
            x = pair(pair(x))
        for _, each in enumerate(self.counted):
            x = each(x)
        for each in self.row:
            x = each(x)
        x = torch.utils.checkpoint.checkpoint(self.handed, x, use_reentrant=False)
        x = self.either(x) if x.sum() > 0 else self.either(-x)
        return [self.inner(each) for each in x]


ONCE = ["", "stem", "helped", "layers", "layers.0", "layers.1", "layers.1.fc", "named.0", "blocks.1", "blocks.0.fc",
        "counted.0", "row.0"]  # fmt: skip
UNKNOWN = ["repeated", "looped", "layers.1.relu", "pairs.0", "handed", "either", "inner", "twice"]


@pytest.mark.parametrize("path", ONCE)
def test_called_once(path: str) -> None:
    net = Net()
    assert is_called_once(net, net.get_submodule(path))


@pytest.mark.parametrize("path", UNKNOWN)
def test_maybe_more_often(path: str) -> None:
    net = Net()
    assert not is_called_once(net, net.get_submodule(path))


def test_doubt() -> None:
    shared = nn.Linear(2, 2)
    assert not is_called_once(nn.Sequential(shared, nn.Sequential(shared)), shared)

    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            for child in self.children():
                x = child(x)
            return self.fc(x)

    class HandsItselfOn(Lists):
        def forward(self, x: Tensor) -> Tensor:
            return call(self, self.fc(x))

    class CallsAPartOfAPart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block.fc(self.block(x))

    call = print
    for net in (Lists(), HandsItselfOn()):
        assert not is_called_once(net, net.fc)
    net = CallsAPartOfAPart()
    assert not is_called_once(net, net.block.fc)
    patched = Net()
    patched.forward = lambda x: patched.stem(patched.stem(x))  # type: ignore[method-assign]
    assert not is_called_once(patched, patched.stem)
    space: dict[str, type[nn.Module]] = {}
    exec("from torch import nn\nclass Typed(nn.Module):\n    def forward(self, x): return self.fc(x)", space)
    typed = space["Typed"]()
    typed.fc = nn.Linear(2, 2)
    assert not is_called_once(typed, typed.fc)
