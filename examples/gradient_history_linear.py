"""A linear layer that remembers the gradients of its outputs, and damps them by its own past.

    python examples/gradient_history_linear.py

All of it is one class: the parameters, the forward, the backward and the history. A small net learns handwritten
digits. Every tenth batch weighs fifty times what the others do, as if somebody had forgotten to take a mean. The layer
shrinks the gradient that then comes in to twice the mean norm of the last eight that it let pass, so its own parameters
and all before it get what follows from that. The history is in the model's state_dict: halfway the model is saved, and
a fresh one goes on from there with the same memory.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import retrograd as rg

STEPS = 60


class GradientHistoryLinear(rg.Function):
    """y = x Wᵀ + b, with g ← g · min(1, factor · m / ‖g‖₂) in backward: m is the mean norm of the last eight g."""

    def __init__(self, features_in: int, features_out: int, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.empty(features_out, features_in))
        self.bias = nn.Parameter(torch.zeros(features_out))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def forward(self, ctx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    def backward(self, ctx, grad_output: Tensor) -> dict[str, Tensor]:
        x, weight = ctx.saved_tensors
        damped = self.damp(grad_output)
        self.remember("grad_output", damped, last=8)
        return {"x": damped @ weight, "weight": damped.T @ x, "bias": damped.sum(0)}

    def damp(self, gradient: Tensor) -> Tensor:
        past = self.remembered["grad_output"]
        if not past:
            return gradient
        usual = torch.stack([torch.linalg.vector_norm(each) for each in past]).mean()
        norm = torch.linalg.vector_norm(gradient)
        return gradient * (self.factor * usual / norm).clamp(max=1)


def make_model() -> nn.Sequential:
    """Flattened images, [N, 64], to class scores, [N, 10]."""
    torch.manual_seed(0)
    return nn.Sequential(GradientHistoryLinear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def make_batches() -> Iterator[tuple[Tensor, Tensor, float]]:
    """Images, labels and weights of batches of 32 digits; the tenth, twentieth, … weigh fifty."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    for number, rows in enumerate(torch.randint(len(images), (STEPS, 32), generator=torch.Generator().manual_seed(0))):
        yield images[rows], labels[rows], 50.0 if number % 10 == 9 else 1.0


def train(model: nn.Sequential, batches: list[tuple[Tensor, Tensor, float]]) -> list[tuple[float, float]]:
    """Take a step for each batch; returns the losses, and the norms that the layer let pass."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for images, labels, weight in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        (weight * loss).backward()
        optimizer.step()
        seen.append((float(loss.detach()), float(model[0].remembered["grad_output"][-1].norm())))
    return seen


def main() -> None:
    batches = list(make_batches())
    model, half = make_model(), STEPS // 2
    seen = train(model, batches[:half])

    checkpoint = io.BytesIO()
    torch.save(model.state_dict(), checkpoint)
    checkpoint.seek(0)
    resumed = make_model()
    resumed.load_state_dict(torch.load(checkpoint, weights_only=True))
    seen += train(resumed, batches[half:])

    print("step  batch weighs    loss  gradient let pass")
    for step in [step for ten in range(8, STEPS, 10) for step in (ten, ten + 1)]:
        loss, norm = seen[step]
        print(f"{step:4d}  {batches[step][2]:12.0f}  {loss:6.3f}  {norm:17.4f}")


if __name__ == "__main__":
    main()
