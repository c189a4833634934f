"""Multiplying by a number."""

from __future__ import annotations

from torch import Tensor

from retrograd.rules.checks import Scheduled, at_step, check_scheduled
from retrograd.rules.rule import Rule, SiteState
from retrograd.rules.sparse import on_values


class Scale(Rule):
    """Multiply: x ← a · x.

    Args:
        factor: a, or a function from the step to it.
    """

    def __init__(self, factor: Scheduled) -> None:
        super().__init__()
        check_scheduled(self, "factor", factor)
        self.factor = factor

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        factor = at_step(self.factor, state.step)
        return on_values(value, lambda values: values * factor)


class Reverse(Rule):
    """Turn a gradient round: g ← −λ · g, the gradient reversal layer of domain adaptation.

    Source: Ganin & Lempitsky 2015, arXiv 1409.7495, who let λ rise from 0 to 1 by 2 / (1 + exp(−10 p)) − 1, where p is
    the share of the training that is over.

    Args:
        weight: λ, or a function from the step to it.
    """

    def __init__(self, weight: Scheduled = 1.0) -> None:
        super().__init__()
        check_scheduled(self, "weight", weight)
        self.weight = weight

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        factor = -at_step(self.weight, state.step)
        return on_values(value, lambda values: values * factor)
