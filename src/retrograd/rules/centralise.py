"""Gradients without their mean."""

from __future__ import annotations

from torch import Tensor

from retrograd.rules.checks import need_dense
from retrograd.rules.rule import Rule, SiteState


class Centralise(Rule):
    """Subtract the mean over all dimensions but the first: gᵢ ← gᵢ − mean(gᵢ), for each output i of a weight.

    Meant for the gradients of weights of linear layers and convolutions. A tensor of fewer than two dimensions, such
    as a bias, is left as it is.

    Source: Yong, Huang, Hua & Zhang 2020, *Gradient Centralization*, arXiv 2004.01461, equation 1.
    """

    def __call__(self, value: Tensor, state: SiteState) -> Tensor | None:
        need_dense(self, value)
        return None if value.ndim < 2 else value - value.mean(dim=tuple(range(1, value.ndim)), keepdim=True)
