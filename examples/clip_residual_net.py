"""Clip what flows through the layers of a residual net that is trained with hooks of your own already.

    python examples/clip_residual_net.py

The net has a forward hook, a tensor hook and a full backward hook of its owner's, all set before. One more line clips
the gradient of ``body`` in each block: the part that comes back to ``x`` through the layers. What comes back to ``x``
over the skip connection is not touched, though both are the gradient of one and the same tensor; a hook on that tensor
could not tell them apart.
"""

from __future__ import annotations

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import retrograd as rg

MAX_NORM = 1e-3


class Block(nn.Module):
    """x + body(x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class ResidualNet(nn.Module):
    """Flattened images, [N, 64], to class scores, [N, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 32)
        self.blocks = nn.Sequential(*(Block(32) for _ in range(4)))
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)))


class OwnHooks:
    """Hooks such as a training script has: of each block the gradient of its output, and what ``body`` hands on."""

    def __init__(self, model: ResidualNet) -> None:
        self.gradients: dict[int, Tensor] = {}
        self.bodies: dict[int, Tensor] = {}
        for number, block in enumerate(model.blocks):
            block.register_forward_hook(partial(self.see_block, number))
            block.body.register_full_backward_hook(partial(self.see_body, number))

    def see_block(self, number: int, block: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        output.register_hook(partial(self.gradients.__setitem__, number))

    def see_body(self, number: int, body: nn.Module, grad_input: tuple[Tensor, ...], grad_output: object) -> None:
        self.bodies[number] = grad_input[0]


def train(model: nn.Module, steps: int) -> None:
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


def main() -> None:
    torch.manual_seed(0)
    model = ResidualNet()
    hooks = OwnHooks(model)
    train(model, 5)

    with rg.rewrite(model, {"blocks.*.body:input.input.grad": rg.rules.ClipNorm(MAX_NORM)}):
        train(model, 5)

    for number in range(1, 4):
        whole, over_skip = hooks.gradients[number - 1], hooks.gradients[number]
        print(
            f"into block {number}: {whole.norm():.4f} in all, {over_skip.norm():.4f} over the skip connection, "
            f"{(whole - over_skip).norm():.4f} through body, {hooks.bodies[number].norm():.4f} before it was clipped"
        )


if __name__ == "__main__":
    main()
