"""Grokfast: amplifying what is slow in a gradient."""

from __future__ import annotations

from torch import Tensor

from retrograd.rules.checks import check_number, need_dense
from retrograd.rules.rule import Rule, SiteState


class Grokfast(Rule):
    """Add a multiple of the gradient's own moving average: m ← α m + (1 − α) g from m = g₁, then g ← g + λ m.

    An element that is not finite stays as it is and is not averaged.

    Source: Lee, Kang, Kim & Lee 2024, arXiv 2405.20233, Grokfast-EMA.

    Args:
        alpha: α, from 0 to below 1.
        weight: λ.
    """

    def __init__(self, alpha: float = 0.98, weight: float = 2.0) -> None:
        super().__init__()
        check_number(self, "alpha", alpha, high=1 - 1e-12)
        check_number(self, "weight", weight, low=-float("inf"))
        self.alpha = alpha
        self.weight = weight

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        need_dense(self, value)
        slow = state.ema("gradient", self.alpha)
        if slow.is_new:
            slow.start(value)
        slow.add(value)
        return value + (self.weight * slow.value).to(value.dtype)
