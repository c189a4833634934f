"""A small net, its data, and a loop without a trainer to hold trainers against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import retrograd as rg

BATCHES = 8
SITES = ["net.0:output", "net.0:output.grad", "net.2:weight.grad", "net.2:weight.update"]


class Net(nn.Module):
    """Called with a batch it gives a loss, as the Trainer of transformers wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Eight batches of four."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4 * BATCHES, 4, generator=generator)
    return x, (x.sum(1) > 0).long()


def train_plainly(accumulate: int = 1, *, rate: float = 0.1, updates: int = 8, scale: bool = True) -> rg.History:
    """Train a net in a loop of its own, recorded in memory; the loss is divided where gradients accumulate."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    x, labels = make_data()
    batches = list(zip(x.split(4), labels.split(4), strict=True))
    with rg.record(model, sites=SITES) as recording:
        for update in range(updates):
            for number in range(accumulate):
                batch = batches[(update * accumulate + number) % BATCHES]
                (model(*batch)["loss"] / (accumulate if scale else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return recording.history


def numbers(history: rg.History) -> dict[str, Any]:
    """What was recorded of training, without the numbers of steps."""
    return {site: (history[site].rms, history[site].abs_max, history[site].mean) for site in SITES}


def check_same(found: rg.History, expected: rg.History) -> None:
    """The same numbers at the same sites, in the same order, to the last bit."""
    for site, values in numbers(expected).items():
        for mine, theirs in zip(numbers(found)[site], values, strict=True):
            np.testing.assert_array_equal(mine, theirs, err_msg=site)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def are_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


def count_hooks(model: nn.Module) -> int:
    """Hooks on modules and parameters."""
    kinds: list[Callable[[nn.Module], Any]] = [
        lambda module: module._forward_hooks,
        lambda module: module._forward_pre_hooks,
        lambda module: module._backward_hooks,
    ]
    on_modules = sum(len(kind(module)) for module in model.modules() for kind in kinds)
    return on_modules + sum(len(p._backward_hooks or ()) for p in model.parameters())
