"""Rules that clip by a norm: to a number, to what norms have been so far, or to that of the weights."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from retrograd.core.errors import RuleError
from retrograd.rewriting.memory.averages import Ema
from retrograd.rewriting.rules.checks import BELOW_ONE, check_count, check_number, need_dense, need_shape
from retrograd.rewriting.rules.norm_rule import NormRule, leave_out_zero, limit_factor
from retrograd.rewriting.rules.rule import Rule, SiteState


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
        check_number(self, "alpha", alpha, high=BELOW_ONE)
        check_number(self, "z_threshold", z_threshold)
        check_count(self, "warmup", warmup)
        check_number(self, "clip_factor", clip_factor)
        if max_norm is not None:
            check_number(self, "max_norm", max_norm)
        if option not in _OPTIONS:
            raise RuleError(
                f"ZClip: option={option!r} is not a valid option.", repair=f"give one of {', '.join(_OPTIONS)}."
            )
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


class AdaGC(NormRule):
    """Clip each norm by an exponential moving average γ of the tensor's own norms after clipping.

        h = min(1, λ_rel γ / ‖g‖)      g ← h g      γ ← β γ + (1 − β) ‖h g‖
        while warming up:              h = min(1, λ_abs / ‖g‖)      γ ← min(γ, ‖h g‖)

    The paper clips the norm of all gradients together while warming up; a rule that sees one site clips that one. A
    norm that is not finite, or is zero, does not enter γ.

    Source: Wang et al. 2025, *AdaGC*, arXiv 2502.11034; defaults as in github.com/kozistr/pytorch_optimizer, whose
    warm-up too ends with the step before number ``warmup``.

    Args:
        beta: β, from 0 to below 1.
        relative: λ_rel.
        absolute: λ_abs.
        warmup: number of the first call that is clipped by γ, counted from 1.
    """

    def __init__(self, beta: float = 0.98, relative: float = 1.05, absolute: float = 1.0, warmup: int = 100) -> None:
        super().__init__()
        check_number(self, "beta", beta, high=BELOW_ONE)
        check_number(self, "relative", relative)
        check_number(self, "absolute", absolute)
        check_count(self, "warmup", warmup)
        self.beta = beta
        self.relative = relative
        self.absolute = absolute
        self.warmup = warmup

    def scale(self, norm: Tensor, state: SiteState) -> Tensor:
        gamma = state.ema("gamma", self.beta)
        call = state.get("calls", 0) + 1
        state.put("calls", call)
        is_warming_up = call < self.warmup
        factor = limit_factor(norm, self.absolute if is_warming_up else self.relative * gamma.value)
        clipped = leave_out_zero(norm.detach() * factor.detach())
        if is_warming_up:
            gamma.start(torch.fmin(gamma.value, clipped))  # fmin passes over NaN
        else:
            gamma.add(clipped)
        return factor


class AGC(Rule):
    """Adaptive gradient clipping: gᵢ ← gᵢ · min(1, λ · max(‖wᵢ‖, ε) / ‖gᵢ‖), unit by unit.

    A unit is a row of a weight, that is all its elements at one place of the first dimension; a tensor of fewer than
    two dimensions is one unit. For gradients of parameters, the last layer's left out, as the authors advise.

    Source: Brock, De, Smith & Simonyan 2021, arXiv 2102.06171, equation 3; one-dimensional parameters as in timm's
    ``adaptive_clip_grad``.

    Args:
        clip: λ; the authors' values lie between 0.01 and 0.16, larger for smaller batches.
        eps: ε, so that weights that begin at zero can leave it.
    """

    needs_value: ClassVar[bool] = True

    def __init__(self, clip: float = 0.01, eps: float = 1e-3) -> None:
        super().__init__()
        check_number(self, "clip", clip)
        check_number(self, "eps", eps)
        self.clip = clip
        self.eps = eps

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        need_dense(self, value)
        if state.value is None:
            raise RuleError(
                "AGC needs the parameter that a gradient belongs to.",
                repair="use it on gradients of parameters, as in 'fc:weight.grad'.",
            )
        need_shape(self, value, state.value.shape)
        limit = self.clip * _measure_units(state.value.detach()).clamp(min=self.eps)
        factor = limit_factor(_measure_units(value), limit.to(value.device))
        return (value * factor).to(value.dtype)


def _measure_units(tensor: Tensor) -> Tensor:
    """‖·‖₂ of each unit, in a shape that broadcasts to the tensor's; float32 for narrower types."""
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    units = tuple(range(1, tensor.ndim)) if tensor.ndim > 1 else None
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=units, keepdim=units is not None)
    return norms


class SkipStep(NormRule):
    """Drop a gradient whose norm is not finite, or lies far above those of the last steps.

        skip if ‖g‖ − mean > k · std, over the last n norms before this one (std divided by n − 1)

    Used jointly on the gradients of an optimizer the whole update is dropped, and the optimizer's own averages and
    weight decay with it; on one site the gradient becomes zero, and a ``GradScaler`` then sees no overflow in it.
    Norms that were skipped enter the window as others
    do, so a level that has risen for good is followed; those that are not finite do not. Nothing is skipped for its
    size until half of the window has come.

    Source: ``SkipStepOptimizer`` of github.com/allenai/OLMo-core, which also looks at the loss.

    Args:
        sigma: k.
        size: n, how many norms to look back on.
    """

    skips: ClassVar[bool] = True

    def __init__(self, sigma: float = 6.0, size: int = 128) -> None:
        super().__init__()
        check_number(self, "sigma", sigma)
        check_count(self, "size", size, low=2)
        self.sigma = sigma
        self.size = size

    def scale(self, norm: Tensor, state: SiteState) -> Tensor:
        last = state.window("norm", self.size)
        is_known = last.count + 1 >= max(2, self.size // 2)
        std, mean = last.std_mean
        is_spike = is_known & (norm - mean > self.sigma * std)
        last.add(norm)
        return (torch.isfinite(norm) & ~is_spike).to(norm.dtype)
