"""AutoClip: clipping at a percentile of all norms so far."""

from __future__ import annotations

from torch import Tensor

from retrograd.rules.checks import check_count, check_number
from retrograd.rules.norm_rule import NormRule, limit_factor
from retrograd.rules.rule import SiteState


class AutoClip(NormRule):
    """Clip to the p-th percentile of the norms so far, this one among them: g ← g · min(1, P_p(‖g₁‖ … ‖g_t‖) / ‖g‖).

    With p = 10 nine gradients in ten are clipped: the rule normalises more than it clips. Norms that are not finite
    do not enter.

    Source: Seetharaman, Wichern, Pardo & Le Roux 2020, arXiv 2007.14469; github.com/pseeth/autoclip. The authors
    recommend p = 10 and the whole history.

    Args:
        percentile: p, from 0 to 100.
        size: how many norms to look back on; None for all. The whole past is looked through at every step.
    """

    def __init__(self, percentile: float = 10.0, size: int | None = None) -> None:
        super().__init__()
        check_number(self, "percentile", percentile, high=100)
        if size is not None:
            check_count(self, "size", size)
        self.percentile = percentile
        self.size = size

    def scale(self, norm: Tensor, state: SiteState) -> Tensor:
        past = state.window("norm", self.size)
        past.add(norm)
        return limit_factor(norm, past.quantile(self.percentile / 100))
