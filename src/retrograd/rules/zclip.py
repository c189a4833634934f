"""ZClip: clipping norms that lie many standard deviations above their average."""

from __future__ import annotations

import torch
from torch import Tensor

from retrograd.errors import RuleError
from retrograd.memory.averages import Ema
from retrograd.rules.checks import check_count, check_number
from retrograd.rules.norm_rule import NormRule, leave_out_zero, limit_factor
from retrograd.rules.rule import SiteState

_OPTIONS = ("adaptive_scaling", "mean")


class ZClip(NormRule):
    """Clip a norm by its z-score against exponential moving averages μ, σ² of the norms before it.

        z = (‖g‖ − μ) / (σ + 10⁻⁶)              if z > z*:   ‖g‖ → f · (μ + z*² σ / z)
        μ ← α μ + (1 − α) n      σ² ← α σ² + (1 − α) (n − μ)²      n the norm after that clip, μ the new one

    The first ``warmup`` calls only learn: μ and σ² begin as the mean and the variance of their norms. ``max_norm`` caps
    the norm at all times and is not seen by the averages. Where σ = 0, a norm above μ is clipped to f · μ.

    A norm that is not finite, or is zero, does not enter: in the package as released, one NaN makes μ NaN for good,
    and after a warm-up of zeros every gradient is zeroed for good.

    Source: Kumar, Owen, Chowdhury & Güra 2025, arXiv 2504.02507; defaults of github.com/bluorion-com/ZClip.

    Args:
        alpha: α, from 0 to below 1.
        z_threshold: z*.
        max_norm: the cap; None for none. The default is meant for the norm of all gradients together.
        warmup: calls at the beginning that only learn.
        option: ``"adaptive_scaling"`` as above, or ``"mean"``: ‖g‖ → μ.
        clip_factor: f, below 1 to clip harder; it does not act on ``"mean"``.
    """

    def __init__(
        self,
        alpha: float = 0.97,
        z_threshold: float = 2.5,
        max_norm: float | None = 1.0,
        warmup: int = 25,
        option: str = "adaptive_scaling",
        clip_factor: float = 1.0,
    ) -> None:
        super().__init__()
        check_number(self, "alpha", alpha, high=1 - 1e-12)
        check_number(self, "z_threshold", z_threshold)
        check_count(self, "warmup", warmup)
        check_number(self, "clip_factor", clip_factor)
        if max_norm is not None:
            check_number(self, "max_norm", max_norm)
        if option not in _OPTIONS:
            raise RuleError(f"ZClip: there is no option={option!r}.", repair=f"give one of {', '.join(_OPTIONS)}.")
        self.alpha = alpha
        self.z_threshold = z_threshold
        self.max_norm = max_norm
        self.warmup = warmup
        self.option = option
        self.clip_factor = clip_factor

    def scale(self, norm: Tensor, state: SiteState) -> Tensor:
        mean, variance = state.ema("mean", self.alpha), state.ema("variance", self.alpha)
        calls = state.get("calls", 0)
        state.put("calls", calls + 1)
        if calls < self.warmup:
            self._warm_up(leave_out_zero(norm), state, mean, variance)
            limit = torch.full_like(norm, torch.inf)
        else:
            limit = self._find_limit(norm, mean.value, variance.value.sqrt())
            learnt = leave_out_zero(norm.detach()).minimum(limit)
            learnt = torch.where(norm.isfinite(), learnt, torch.nan)
            mean.add(learnt)
            variance.add((learnt - mean.value).square())
        return limit_factor(norm, limit if self.max_norm is None else limit.clamp(max=self.max_norm))

    def _warm_up(self, norm: Tensor, state: SiteState, mean: Ema, variance: Ema) -> None:
        first = state.window("warm-up", self.warmup)
        first.add(norm)
        mean.start(first.mean)
        variance.start(first.variance)

    def _find_limit(self, norm: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """The norm that a spike is clipped to; infinity for a norm that is not a spike."""
        z = (norm - mean) / (std + 1e-6)
        is_spike = z > self.z_threshold
        target = mean
        if self.option == "adaptive_scaling":
            target = self.clip_factor * (mean + self.z_threshold**2 * std / torch.where(is_spike, z, 1))
        return torch.where(is_spike, target, torch.inf)
