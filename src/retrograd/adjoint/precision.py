"""How exactly numbers of a dtype can be compared, and with which steps they can be differentiated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Precision:
    """What to expect of one dtype.

    Attributes:
        name: the dtype, or dtypes.
        epsilon: the distance from one to the next larger number.
        forward_mode: how far forward and backward mode may differ, relatively.
        differences: how far finite differences and backward mode may differ, their own estimated error apart.
        settled: the largest estimated error of finite differences that still tells something.
        steps: steps of finite differences, relative to the size of what is moved: the first for smooth functions,
            smaller ones for many kinks close by, larger ones where rounding is coarse.
    """

    name: str
    epsilon: float
    forward_mode: float
    differences: float
    settled: float
    steps: tuple[float, ...]


_DOUBLE = Precision("float64", torch.finfo(torch.float64).eps, 1e-8, 1e-6, 1e-3, (1e-4, 1e-6, 1e-2, 1e-8))
_MIXED = Precision("float32 inside", torch.finfo(torch.float32).eps, 1e-4, 1e-3, 3e-2, (1e-2, 1e-1, 2e-3))
_SINGLE = Precision("float32", torch.finfo(torch.float32).eps, 1e-3, 3e-3, 3e-2, (1e-2, 1e-1, 2e-3))
_HALF = Precision("half precision", torch.finfo(torch.bfloat16).eps, 5e-2, 5e-2, 1e-1, (1e-1, 3e-1))


def find_precision(outputs: Iterable[torch.dtype], inside: Iterable[torch.dtype]) -> Precision:
    """The precision of a module.

    Args:
        outputs: dtypes of what it returns.
        inside: dtypes of what it computes on the way, as norms do that cast to float32 whatever they are given.
    """
    returned = {dtype.to_real() for dtype in outputs}
    passed = {dtype.to_real() for dtype in inside if dtype.is_floating_point or dtype.is_complex}
    if (returned | passed) & {torch.float16, torch.bfloat16}:
        return _HALF
    if returned != {torch.float64}:
        return _SINGLE
    return _DOUBLE if passed <= {torch.float64} else _MIXED
