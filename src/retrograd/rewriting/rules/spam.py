"""The clips of SPAM and Stable-SPAM: of elements, and of the norm, against their own past."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from retrograd.rewriting.rules.checks import BELOW_ONE, check_count, check_number, need_dense, need_shape
from retrograd.rewriting.rules.norm_rule import NormRule, leave_out_zero
from retrograd.rewriting.rules.rule import Rule, SiteState


class SpikeClip(Rule):
    """Clip elements whose square is far above its moving average: where gᵢ² > θ vᵢ, gᵢ ← sign(gᵢ) √(θ vᵢ).

        vᵢ ← β vᵢ + (1 − β) gᵢ²      from 0, with gᵢ as it is after clipping

    The rule has a second moment of its own, the one that Adam has in the paper. Every ``reset_every`` calls it begins
    anew, as Adam's momentum does there; the ``rest`` calls after that clip nothing. An element without a past (v = 0),
    such as a word of an embedding that is seen for the first time, is not clipped; as published it would stay at
    zero until the next reset. What is not finite stays as it is and is not averaged.

    Source: Huang et al. 2025, *SPAM*, arXiv 2501.06842; defaults of github.com/TianjinYellow/SPAM-Optimizer. It is
    element-wise clipping alone: the reset of the optimizer's momentum and its warm-up are not a matter of gradients.

    Args:
        threshold: θ.
        beta: β, from 0 to below 1.
        reset_every: calls between resets; None for never.
        rest: calls at the beginning, and after each reset, that clip nothing.
    """

    is_elementwise: ClassVar[bool] = True

    def __init__(
        self, threshold: float = 5000.0, beta: float = 0.999, reset_every: int | None = 500, rest: int = 20
    ) -> None:
        super().__init__()
        check_number(self, "threshold", threshold)
        check_number(self, "beta", beta, high=BELOW_ONE)
        check_count(self, "rest", rest, low=0)
        if reset_every is not None:
            check_count(self, "reset_every", reset_every)
        self.threshold = threshold
        self.beta = beta
        self.reset_every = reset_every
        self.rest = rest

    def __call__(self, value: Tensor, state: SiteState) -> Tensor | None:
        need_dense(self, value)
        call = state.get("calls", 0) + 1
        state.put("calls", call)
        since_reset = call % self.reset_every if self.reset_every else call
        if self.reset_every and since_reset == 0:
            state.forget("second moment")
        moment = state.get("second moment", device=value.device)
        clipped = None
        if moment is not None and call >= self.rest and since_reset >= self.rest:
            need_shape(self, value, moment.shape)
            clipped = self._clip(value, moment)
        self._learn(value if clipped is None else clipped, moment, state)
        return clipped

    def _clip(self, value: Tensor, moment: Tensor) -> Tensor:
        square = _square(value)
        is_spike = (square > self.threshold * moment) & (square < torch.inf) & (moment > 0)
        return torch.where(is_spike, value.sgn() * (self.threshold * moment).sqrt(), value).to(value.dtype)

    def _learn(self, value: Tensor, moment: Tensor | None, state: SiteState) -> None:
        square = _square(value.detach())
        moment = torch.zeros_like(square) if moment is None else moment
        learnt = self.beta * moment + (1 - self.beta) * square
        state.put("second moment", torch.where(square < torch.inf, learnt, moment))


def _square(value: Tensor) -> Tensor:
    """|gᵢ|², float32 for narrower types."""
    magnitude = value.abs()
    return magnitude.to(torch.promote_types(magnitude.dtype, torch.float32)).square()


# ---- Stable-SPAM ----


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
        check_number(self, "gamma1", gamma1, high=BELOW_ONE)
        check_number(self, "gamma2", gamma2, high=BELOW_ONE)
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
        check_number(self, "theta", theta, high=BELOW_ONE)
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
