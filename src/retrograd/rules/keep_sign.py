"""Elements of one sign."""

from __future__ import annotations

from torch import Tensor

from retrograd.rules.checks import need_real
from retrograd.rules.rule import Rule, SiteState


class KeepSign(Rule):
    """Keep positive elements and put zeros in place of negative ones: g ← max(g, 0); NaN stays.

    On the gradient of the output of every ReLU this is guided backpropagation, R = 1[f > 0] · 1[R' > 0] · R': the rule
    makes the second factor, and the backward pass of the ReLU, through which the gradient flows next, the first.

    Source: Springenberg, Dosovitskiy, Brox & Riedmiller 2015, arXiv 1412.6806.

    Args:
        positive: False keeps the negative elements instead.
    """

    def __init__(self, *, positive: bool = True) -> None:
        super().__init__()
        self.positive = positive

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        need_real(self, value)
        return value.clamp(min=0) if self.positive else value.clamp(max=0)
