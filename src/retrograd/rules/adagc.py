"""AdaGC: clipping each tensor by the average of its own clipped norms."""

from __future__ import annotations

import torch
from torch import Tensor

from retrograd.rules.checks import check_count, check_number
from retrograd.rules.norm_rule import NormRule, leave_out_zero, limit_factor
from retrograd.rules.rule import SiteState


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
        check_number(self, "beta", beta, high=1 - 1e-12)
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
