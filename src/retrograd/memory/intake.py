"""How a number or a tensor comes into an accumulator."""

from __future__ import annotations

import torch
from torch import Tensor

_KEPT_TYPES = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})


def take_in(given: Tensor | float, device: torch.device | None = None) -> Tensor:
    """What is accumulated of ``given``: detached, and in a type that can be added to for long.

    Float64 and complex128 stay as they are, other complex types become complex64, everything else float32.

    Args:
        given: a tensor, which stays on its device; or a number.
        device: where to put a number.
    """
    tensor = given.detach() if isinstance(given, Tensor) else torch.tensor(given, device=device)
    if tensor.dtype in _KEPT_TYPES:
        return tensor
    return tensor.to(torch.complex64 if tensor.is_complex() else torch.float32)


def is_finite(x: Tensor) -> Tensor:
    """As ``torch.isfinite``, in fewer operations, which is what a number costs."""
    return x.abs() < torch.inf


def make_empty() -> Tensor:
    """The value of an accumulator that nothing has entered: NaN."""
    return torch.tensor(float("nan"))
