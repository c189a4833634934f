"""Something else in place of what is there."""

from __future__ import annotations

import torch
from torch import Tensor

from retrograd.rules.checks import check_number, need_dense, need_shape
from retrograd.rules.rule import Rule, SiteState


class Replace(Rule):
    """Put a tensor or a number in place of everything: x ← r. No gradient flows on from a value that is replaced.

    Args:
        replacement: r; a tensor has the shape of the one it takes the place of, or broadcasts to it, and is converted
            to its type and device.
    """

    def __init__(self, replacement: Tensor | float) -> None:
        super().__init__()
        if not isinstance(replacement, Tensor):
            check_number(self, "replacement", replacement, low=-float("inf"))
        self.replacement = replacement.detach() if isinstance(replacement, Tensor) else replacement

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        need_dense(self, value)
        if not isinstance(self.replacement, Tensor):
            return torch.full_like(value, self.replacement)
        wanted = self.replacement.to(device=value.device, dtype=value.dtype)
        need_shape(self, value, torch.broadcast_shapes(wanted.shape, value.shape))
        return wanted.expand_as(value).clone()  # others may write into what a rule returns
