"""The Euclidean norm of a tensor, and of several as if they were one vector; sums of products likewise.

One answer for all rooms: half precision is summed in float32, where its squares fit, and types that torch cannot reduce
are widened first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_NOT_REDUCED = {torch.complex32: torch.complex64}
"""Types that torch's norm does not widen by itself, besides those of one byte."""


def norm(values: Tensor, at_least: torch.dtype = torch.float32) -> Tensor:
    """‖values‖₂ without dimensions, on the device of the values, differentiable.

    Args:
        values: of any floating-point or complex type, dense; of another layout what torch has a norm for.
        at_least: the sum is taken in this type, or in the tensor's own where that is wider.

    Returns:
        A real scalar: NaN where a value is NaN, infinite where one is, or where the type cannot hold the norm.

    Raises:
        RuntimeError: torch has no norm for this kind of tensor.
    """
    if values.dtype is at_least:
        own: Tensor = torch.linalg.vector_norm(values)
        return own
    if values.dtype.itemsize == 1 or values.dtype in _NOT_REDUCED:
        values = values.to(_NOT_REDUCED.get(values.dtype, torch.float32))
    wide = summing_type(values.dtype, at_least)
    found: Tensor = torch.linalg.vector_norm(values, dtype=wide if wide is not values.dtype else None)
    return found


def summing_type(dtype: torch.dtype, at_least: torch.dtype = torch.float32) -> torch.dtype:
    """The type that squares of this one are summed in."""
    return torch.promote_types(dtype, at_least)


def join_norms(norms: Sequence[Tensor]) -> Tensor:
    """The norm of several tensors as if they were one vector: √Σ ‖·‖², on the device of the first."""
    joined: Tensor = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]))
    return joined


def add_up(numbers: Sequence[Tensor]) -> Tensor:
    """The sum of numbers without dimensions, on the device of the first.

    Of those that are spread over processes (``DTensor``s) the sum over all processes is taken: one collective for all
    that are spread in the same way.
    """
    device = numbers[0].device
    plain: list[Tensor] = []
    ways: dict[Any, list[Any]] = {}
    for number in numbers:
        if hasattr(number, "full_tensor"):
            ways.setdefault((number.device_mesh, number.placements, number.dtype), []).append(number)  # type: ignore[attr-defined]
        else:
            plain.append(number)
    plain += [functools.reduce(torch.add, same).full_tensor() for same in ways.values()]
    return torch.stack([number.to(device) for number in plain]).sum()
