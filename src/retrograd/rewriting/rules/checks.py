"""Checks of what rules are given, with the errors that they raise."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from retrograd.core.errors import RuleError

Scheduled = float | Callable[[int], float]
"""A number, or a function from the step to one."""

BELOW_ONE = 1 - 1e-12
"""Upper bound for the coefficient of a moving average."""


def check_number(rule: object, name: str, value: object, low: float = 0.0, high: float = math.inf) -> None:
    """Make sure that a number given to a rule lies between two bounds, bounds included.

    Raises:
        RuleError: if it does not, or is not a number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        span = f"from {low:g} to {high:g}" if math.isfinite(high) else f"from {low:g} on"
        raise RuleError(
            f"{type(rule).__name__}: {name}={value!r} is not a valid value.",
            repair=f"give a number {span} for `{name}`.",
        )


def check_count(rule: object, name: str, value: object, low: int = 1) -> None:
    """Make sure that a number given to a rule is a whole one.

    Raises:
        RuleError: if it is not, or is below ``low``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise RuleError(
            f"{type(rule).__name__}: {name}={value!r} is not a valid value.",
            repair=f"give a whole number from {low} on for `{name}`.",
        )


def check_scheduled(rule: object, name: str, value: object, low: float = -math.inf) -> None:
    """Make sure that this is a number, or a function that may return one.

    Raises:
        RuleError: for anything else.
    """
    if not callable(value):
        check_number(rule, name, value, low)


def at_step(given: Scheduled, step: int) -> float:
    """The number that holds at a step."""
    return given(step) if callable(given) else given


def need_dense(rule: object, value: Tensor) -> None:
    """Make sure that a rule which works element by element sees all elements.

    Raises:
        RuleError: for a sparse, nested or otherwise laid out tensor.
    """
    if value.layout is not torch.strided:
        raise RuleError(
            f"{type(rule).__name__} works on dense tensors, and this one is laid out as {value.layout}.",
            repair="make the gradient dense, as nn.Embedding(sparse=False) does, or take Scale, ClipNorm or another "
            "rule of the norm.",
        )


def need_real(rule: object, value: Tensor) -> None:
    """Make sure that the elements can be ordered.

    Raises:
        RuleError: for complex numbers, and for tensors that are not dense.
    """
    need_dense(rule, value)
    if value.is_complex():
        raise RuleError(
            f"{type(rule).__name__} compares elements, and complex numbers have no order.",
            repair="take a rule of the norm, such as rg.rules.ClipNorm.",
        )


def need_shape(rule: object, value: Tensor, shape: torch.Size) -> None:
    """Make sure that a tensor has the shape of what it is to be put together with.

    Raises:
        RuleError: if it has another one.
    """
    if value.shape != shape:
        raise RuleError(
            f"{type(rule).__name__} has a tensor of shape {tuple(shape)} for one of shape {tuple(value.shape)}.",
            repair="use it where the shape stays the same, and one instance for each batch size.",
        )
