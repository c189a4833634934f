"""The two clips of Stable-SPAM: of single elements and of the norm, each by its own moving average."""

from __future__ import annotations

import torch
from torch import Tensor

from retrograd.rules.checks import check_number, need_dense
from retrograd.rules.norm_rule import NormRule, leave_out_zero
from retrograd.rules.rule import Rule, SiteState

_BELOW_ONE = 1 - 1e-12


class EmaClip(NormRule):
    """Bring the norm to the ratio of its moving averages, AdaGN of Stable-SPAM: g ← g / ‖g‖ · m̂ / (√v̂ + ε).

        m ← γ₁ m + (1 − γ₁) ‖g‖      v ← γ₂ v + (1 − γ₂) ‖g‖²      m̂, v̂ corrected for their beginning at zero

    The norm becomes about 1, less after a spike: small gradients are enlarged too. A gradient that is zero or not
    finite stays as it is and is not averaged.

    Source: Huang et al. 2025, *Stable-SPAM*, arXiv 2502.17055, where :class:`PeakClip` comes before it; defaults as in
    github.com/kozistr/pytorch_optimizer.

    Args:
        gamma1: γ₁, from 0 to below 1.
        gamma2: γ₂, from 0 to below 1.
        eps: ε.
    """

    def __init__(self, gamma1: float = 0.7, gamma2: float = 0.9, eps: float = 1e-8) -> None:
        super().__init__()
        check_number(self, "gamma1", gamma1, high=_BELOW_ONE)
        check_number(self, "gamma2", gamma2, high=_BELOW_ONE)
        check_number(self, "eps", eps)
        self.gamma1 = gamma1
        self.gamma2 = gamma2
        self.eps = eps

    def scale(self, norm: Tensor, state: SiteState) -> Tensor:
        first, second = state.ema("norm", self.gamma1), state.ema("square", self.gamma2)
        first.add(leave_out_zero(norm))
        second.add(leave_out_zero(norm).square())
        target = first.value / (second.value.sqrt() + self.eps)
        is_usable = (norm > 0) & torch.isfinite(norm)
        return torch.where(is_usable, target / torch.where(is_usable, norm, 1), 1)


class PeakClip(Rule):
    """Bring elements above the average peak down to it, AdaClip of Stable-SPAM: where |gᵢ| > T̂, gᵢ ← gᵢ / max|g| · T̂.

        T ← θ T + (1 − θ) max|g|      T̂ = T / (1 − θᵗ)

    Elements that are not finite stay, and enter neither the maximum nor T.

    Source: Huang et al. 2025, *Stable-SPAM*, arXiv 2502.17055.

    Args:
        theta: θ, from 0 to below 1.
    """

    def __init__(self, theta: float = 0.999) -> None:
        super().__init__()
        check_number(self, "theta", theta, high=_BELOW_ONE)
        self.theta = theta

    def __call__(self, value: Tensor, state: SiteState) -> Tensor | None:
        need_dense(self, value)
        if not value.numel():
            return None
        magnitude = value.abs()
        is_finite = magnitude < torch.inf
        peak = torch.where(is_finite, magnitude, 0).amax()
        average = state.ema("peak", self.theta)
        average.add(peak)
        limit = average.value
        is_above = is_finite & (magnitude > limit)
        scaled = value * (limit / torch.where(peak > 0, peak, 1))
        return torch.where(is_above, scaled.to(value.dtype), value)
