"""Freeze one bias: its gradient is made zero, and all else trains as ever.

    python examples/freeze_one_bias.py

The bias stays bitwise as it was, because plain SGD with momentum moves nothing whose gradient has always been zero. An
optimizer with weight decay shrinks a parameter also without a gradient; for such a one leave the bias out of its list.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import retrograd as rg


class Classifier(nn.Module):
    """Flattened images, [N, 64], to class scores, [N, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc2(self.fc1(images).relu())


def train(model: nn.Module, steps: int = 50) -> None:
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


def main() -> None:
    torch.manual_seed(0)
    model = Classifier()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    with rg.rewrite(model, {"fc1:bias.grad": rg.rules.Zero()}):
        train(model)

    for name, parameter in model.named_parameters():
        moved = (parameter - before[name]).norm()
        print(f"{name:10} {'the same bits' if torch.equal(parameter, before[name]) else f'moved by {moved:.3f}'}")


if __name__ == "__main__":
    main()
