"""Print the shape of what every child of a net returns, as they run, and then of the gradients that come back.

    python examples/print_shapes.py

A rule that returns None changes nothing, so it is a way to look at what passes by. ``*:output*`` is the output of any
module at any depth, each tensor of a nested one, and the gradients of all of them. The LSTM returns three tensors, of
which one is used.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

import retrograd as rg


class Captioner(nn.Module):
    """Images, [N, 3, 16, 16], to scores of three words, [N, 3, 20]."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            OrderedDict(conv=nn.Conv2d(3, 8, 3, stride=2), act=nn.ReLU(), pool=nn.AdaptiveAvgPool2d(1))
        )
        self.rnn = nn.LSTM(8, 12, batch_first=True)
        self.head = nn.Linear(12, 20)

    def forward(self, images: Tensor) -> Tensor:
        features = self.encoder(images).flatten(1)
        states, _ = self.rnn(features[:, None].expand(-1, 3, -1))
        return self.head(states)


def print_shape(value: Tensor, state: rg.rules.SiteState) -> None:
    print(f"{state.site:24} {list(value.shape)}")


def main() -> None:
    torch.manual_seed(0)
    model = Captioner()
    with rg.rewrite(model, {"*:output*": print_shape}):
        model(torch.randn(4, 3, 16, 16)).sum().backward()


if __name__ == "__main__":
    main()
