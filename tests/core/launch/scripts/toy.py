"""What all the scripts train: a small classifier on made-up data."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x))


def make_batch(size=8):
    x = torch.randn(size, 4)
    return x, (x.sum(1) > 0).long()


def show(loss):
    print(repr(loss.item()), flush=True)
