"""Leaving out all elements, or some."""

from __future__ import annotations

import torch
from torch import Tensor

from retrograd.errors import RuleError
from retrograd.rules.checks import need_dense
from retrograd.rules.rule import Rule, SiteState


class Zero(Rule):
    """Put zeros in place of everything, NaN too: x ← 0. On a gradient, nothing flows on from here."""

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        return torch.zeros_like(value)


class Mask(Rule):
    """Keep some elements and put zeros in place of the others, whatever these hold: x ← x where m, else 0.

    Args:
        mask: m, bool, of the shape of the tensor or one that broadcasts to it. It is moved to the tensor's device at
            every call, so give it there.

    Raises:
        RuleError: for a mask that is not a tensor of bools.
    """

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise RuleError(
                f"Mask: {type(mask).__name__ if not isinstance(mask, Tensor) else mask.dtype} is not a mask.",
                repair="give a tensor of bools, True where an element is kept.",
            )
        self.mask = mask.detach()

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        need_dense(self, value)
        kept = torch.where(self.mask.to(value.device), value, 0)
        if kept.shape != value.shape:
            raise RuleError(
                f"Mask: a mask of shape {tuple(self.mask.shape)} does not fit a tensor of shape {tuple(value.shape)}.",
                repair="give a mask that broadcasts to the tensor.",
            )
        return kept
