"""Damp a layer's gradient by the running norm of its own past.

    python examples/damp_by_history.py

A small net learns handwritten digits. Every tenth batch weighs fifty times what the others do, as if somebody had
forgotten to take a mean, so a gradient fifty times too large comes back to the first layer's output. The rule knows
what is usual there, for it keeps an average of the norms that it has let pass, and shrinks what is larger. It acts in
the backward pass, so the layer's weights get the gradient that follows from the damped one. What it does is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import retrograd as rg

SITE = "fc1:output.grad"
STEPS = 60


class DampByHistory(rg.rules.Rule):
    """g ← g · min(1, factor · m / ‖g‖₂), where m is the moving average of the norms that were let pass."""

    def __init__(self, factor: float = 2.0, decay: float = 0.9) -> None:
        super().__init__()
        self.factor = factor
        self.decay = decay

    def __call__(self, gradient: Tensor, state: rg.rules.SiteState) -> Tensor:
        norm = torch.linalg.vector_norm(gradient)
        usual = state.ema("norm", self.decay)
        limit = self.factor * usual.value  # NaN before the first norm, and nothing is larger than NaN
        scale = torch.where(norm > limit, limit / norm, 1.0)
        usual.add(torch.where(norm > 0, norm * scale, torch.nan))  # as NaN, zero is no past: it would let nothing pass
        return gradient * scale


class Classifier(nn.Module):
    """Flattened images, [N, 64], to class scores, [N, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc2(self.fc1(images).relu())


def make_batches(count: int) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Images, labels and weights of batches of 32 digits; the tenth, twentieth, … weigh fifty."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    for number, rows in enumerate(torch.randint(len(images), (count, 32), generator=torch.Generator().manual_seed(0))):
        yield images[rows], labels[rows], 50.0 if number % 10 == 9 else 1.0


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, labels, weight in make_batches(STEPS):
        optimizer.zero_grad()
        (weight * F.cross_entropy(model(images), labels)).backward()
        optimizer.step()


def main() -> None:
    torch.manual_seed(0)
    model = Classifier()

    with rg.record(model, sites=[SITE]) as recording, rg.rewrite(model, {SITE: DampByHistory()}):
        train(model)

    acts = [event for event in recording.history.events if event.kind == "rewrite"]
    print(f"{SITE}: damped in {len(acts)} of {STEPS} steps")
    for act in acts:
        print(f"  step {act.moment.step:2d}: {act.value:.1%} taken away by {act.text}")


if __name__ == "__main__":
    main()
