"""Skipping updates whose gradient is an outlier."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from retrograd.rules.checks import check_count, check_number
from retrograd.rules.norm_rule import NormRule
from retrograd.rules.rule import SiteState


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
