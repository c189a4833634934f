"""Rules that multiply a whole tensor by one factor, which follows from its norm and what came before."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from retrograd.core.errors import RuleError
from retrograd.core.norms import norm
from retrograd.rewriting.rules.rule import Rule, SiteState
from retrograd.rewriting.rules.sparse import is_packed, is_sparse, on_values


class NormRule(Rule):
    """value ← factor · value. Subclasses write :meth:`scale`, which sees the norm and nothing else of the tensor.

    So the same rule works on one tensor, on all gradients of an optimizer as if they were one vector, and on a
    recording that holds norms alone (:func:`retrograd.rewriting.rules.simulation.simulate_rule`).

    Attributes:
        skips: the factor is 0 or 1, and 0 means that the update should not take place. The tensor becomes zero then,
            whatever is in it.
    """

    skips: ClassVar[bool] = False

    def scale(self, norm: Tensor, state: SiteState) -> Tensor:
        """The factor.

        It must follow from the arguments alone, must not wait for the device, and should keep what is not finite out
        of ``state``, as the accumulators there do.

        Args:
            norm: ‖value‖₂, without dimensions, float32 or float64, on the device of the value. It is NaN when the
                value holds a NaN, and infinite when it holds an infinity (or when float32 cannot hold the norm).
            state: the state of the site.

        Returns:
            A real tensor without dimensions on the same device.
        """
        raise NotImplementedError

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        """The value times its factor, differentiable as a function of the value."""
        return self.rescale(value, self.scale(measure_norm(value), state))

    def rescale(self, value: Tensor, factor: Tensor) -> Tensor:
        """Multiply; for a rule that skips, 0 makes zeros even of NaN."""
        if factor.device != value.device:
            factor = factor.to(value.device)
        if self.skips:
            return on_values(value, lambda values: values.masked_fill(~(factor > 0), 0))
        return on_values(value, lambda values: _multiply(values, factor))


def _multiply(values: Tensor, factor: Tensor) -> Tensor:
    product = values * factor
    return product if product.dtype is values.dtype else product.to(values.dtype)


def measure_norm(value: Tensor) -> Tensor:
    """‖value‖₂ without dimensions: float64 for float64 and complex128, else float32.

    Raises:
        RuleError: for integers, and for layouts other than dense and COO.
    """
    if not (value.is_floating_point() or value.is_complex()):
        raise RuleError(f"A tensor of {value.dtype} has no norm.", repair="rewrite sites of floating-point tensors.")
    if value.layout is torch.strided:
        return norm(value)
    if is_sparse(value):
        value = value.coalesce().values()
    elif is_packed(value):
        value = value.values()
    else:
        raise RuleError(f"The norm of a tensor laid out as {value.layout} is not known.", repair="make it dense.")
    return norm(value)


def limit_factor(norm: Tensor, limit: Tensor | float) -> Tensor:
    """min(1, limit / norm), with a derivative that is finite everywhere.

    1 where either is NaN, so what is not known clips nothing; 0 where the norm is infinite.
    """
    if not (norm.requires_grad or isinstance(limit, Tensor)) and _SMALLEST <= limit <= _LARGEST:
        bound = torch.full_like(norm, limit)  # each operation costs more than what it computes
        return bound / torch.fmax(norm, bound)
    above = norm > limit
    if not norm.requires_grad:
        return torch.where(above, limit / norm, 1)
    return torch.where(above, limit / torch.where(above, norm, 1), 1)


_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
"""Limits that a norm of any type can be divided by."""


def leave_out_zero(norm: Tensor) -> Tensor:
    """The norm as a statistic takes it: NaN, which enters none, in place of zero.

    A limit that has learnt from zeros alone lets nothing pass, so it would never learn of anything else.
    """
    return torch.where(norm > 0, norm, torch.nan)
