"""Clipping by the norm."""

from __future__ import annotations

from torch import Tensor

from retrograd.rules.checks import check_number
from retrograd.rules.norm_rule import NormRule, limit_factor
from retrograd.rules.rule import SiteState


class ClipNorm(NormRule):
    """Shrink a tensor to a norm: g ← g · min(1, c / ‖g‖₂).

    A tensor with a NaN stays as it is. One whose norm is infinite becomes 0 where it is finite and NaN where it is
    not, as in ``torch.nn.utils.clip_grad_norm_``, which differs in adding 10⁻⁶ to the norm.

    Source: Pascanu, Mikolov & Bengio 2013, arXiv 1211.5063.

    Args:
        max_norm: c, from 0 on.
    """

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        check_number(self, "max_norm", max_norm)
        self.max_norm = max_norm

    def scale(self, norm: Tensor, state: SiteState) -> Tensor:
        return limit_factor(norm, self.max_norm)
