"""A net and a loop that draw random numbers of all kinds, so that a look at them from outside would show."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from torch import nn


def make_net() -> nn.Module:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # the generator of the process
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))


def draw() -> float:
    return float(np.random.rand())  # noqa: NPY002


def train(model: nn.Module, steps: int = 12, *, each: Callable[[], object] = lambda: None) -> list[float]:
    """Train with random numbers of all three kinds; returns losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 4)).square().mean() * (1 + 0.1 * random.random() + 0.1 * draw())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        each()
    return losses
