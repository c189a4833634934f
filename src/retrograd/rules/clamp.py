"""Bounds for each element."""

from __future__ import annotations

from torch import Tensor

from retrograd.errors import RuleError
from retrograd.rules.checks import check_number, need_real
from retrograd.rules.rule import Rule, SiteState
from retrograd.rules.sparse import is_sparse, on_values


class Clamp(Rule):
    """Keep elements between two bounds: x ← min(max(x, low), high). Infinities are bounded too; NaN stays.

    On a value, the backward pass of the clamp follows: no gradient flows where a bound was met.

    Args:
        low: lower bound; None for none.
        high: upper bound; None for none.

    Raises:
        RuleError: for no bound at all, or a lower one above the upper.
    """

    def __init__(self, low: float | None = None, high: float | None = None) -> None:
        super().__init__()
        if low is None and high is None:
            raise RuleError("Clamp() bounds nothing.", repair="give `low`, `high` or both.")
        if low is not None and high is not None and not low <= high:
            raise RuleError(f"Clamp({low!r}, {high!r}) leaves no number over.", repair="give the lower bound first.")
        self.low = low
        self.high = high

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        need_real(self, value)
        return value.clamp(self.low, self.high)


class ClipValue(Rule):
    """Bound the magnitude of each element: g ← min(max(g, −c), c), as ``torch.nn.utils.clip_grad_value_``.

    Args:
        limit: c, from 0 on.
    """

    def __init__(self, limit: float) -> None:
        super().__init__()
        check_number(self, "limit", limit)
        self.limit = limit

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        if not is_sparse(value):
            need_real(self, value)
        return on_values(value, lambda values: values.clamp(-self.limit, self.limit))
