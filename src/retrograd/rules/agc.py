"""Clipping each unit's gradient by the norm of its weights."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from retrograd.errors import RuleError
from retrograd.rules.checks import check_number, need_dense, need_shape
from retrograd.rules.norm_rule import limit_factor
from retrograd.rules.rule import Rule, SiteState


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
