"""The features of two layers as a dictionary: what they return for a batch, with nothing set up and nothing left over.

    python examples/two_features.py

The forward ends once the last of the two has run, so the head is not computed. With ``differentiable=True`` the
features keep their graph.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import retrograd as rg


def make_stage(channels_in: int, channels_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 3, stride, padding=1), nn.ReLU())


class DigitNet(nn.Module):
    """Images, [N, 1, 8, 8], to scores, [N, 10], by way of the layers that image nets are wont to have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = make_stage(1, 8)
        self.layer2 = make_stage(8, 16, stride=2)
        self.layer3 = make_stage(16, 16)
        self.layer4 = make_stage(16, 32, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = self.layer4(self.layer3(self.layer2(self.layer1(images))))
        return self.head(self.avgpool(features).flatten(1))


def load_images(count: int) -> Tensor:
    return torch.tensor(load_digits().images[:count], dtype=torch.float32)[:, None] / 16


def main() -> None:
    torch.manual_seed(0)
    model = DigitNet().eval()

    features = rg.extract(model, load_images(5), ["layer4", "avgpool"])

    for name, value in features.items():
        print(f"{name:8} {list(value.shape)!s:14} mean {value.mean():.4f}")


if __name__ == "__main__":
    main()
