"""The adjoint of x + A x: by hand, by autograd, as recorded, and as checked.

A residual block computes Φ(x) = x + A x. Its derivative is I + A, whatever x is. So the adjoint variable, which is what
comes in to a block in the backward pass, obeys

    λₙ = (∂Φₙ/∂xₙ)ᵀ λₙ₊₁ = (I + Aₙ)ᵀ λₙ₊₁,        λ at the end = ∂loss/∂x at the end

    python examples/adjoint_by_hand.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import retrograd as rg

DEPTH, WIDTH = 3, 4


class Residual(nn.Module):
    """Φ(x) = x + A x, for rows x."""

    def __init__(self) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + x @ self.A.T


def adjoints_by_hand(blocks: nn.Sequential, last: Tensor) -> list[Tensor]:
    """λ at the input of each block, from λ behind the last one: a row λₙ₊₁ times (I + Aₙ)."""
    adjoints = [last]
    for block in reversed(blocks):
        adjoints.insert(0, adjoints[0] @ (torch.eye(WIDTH) + block.A.detach()))
    return adjoints


def main() -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Residual() for _ in range(DEPTH)))
    x, target = torch.randn(1, WIDTH, requires_grad=True), torch.randn(1, WIDTH)

    with rg.record(blocks, tensors="*:output.grad") as recording:
        end = blocks(x)
        (0.5 * (end - target).square().sum()).backward()

    by_hand = adjoints_by_hand(blocks, end.detach() - target)  # the derivative of the loss
    print("adjoint of          by hand                              as recorded")
    print(f"the input           {show(by_hand[0])}  {show(x.grad)}   (autograd)")
    for number, adjoint in enumerate(by_hand[1:]):
        recorded = recording.history[f"{number}:output.grad"].tensors[-1].tensor
        print(f"block {number}'s output    {show(adjoint)}  {show(recorded)}")

    print("\n<(I + A) v, u> = <v, (I + A)^T u>, for each block and its A:\n")
    print(rg.check_adjoint(blocks, x))


def show(row: Tensor | None) -> str:
    """One row of numbers."""
    assert row is not None
    return " ".join(f"{value:8.4f}" for value in row.flatten().tolist())


if __name__ == "__main__":
    main()
