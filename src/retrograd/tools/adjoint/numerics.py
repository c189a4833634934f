"""Tensors as vectors of all their elements, and the precision that they can be compared with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


def inner_product(left: Tensor, right: Tensor) -> float:
    """Re⟨left, right⟩ over all elements, summed in float64."""
    if left.is_complex() or right.is_complex():
        left, right = left.resolve_conj().to(torch.complex128), right.resolve_conj().to(torch.complex128)
        return float(torch.vdot(left.flatten(), right.flatten()).real)
    return float(torch.dot(left.flatten().double(), right.flatten().double()))


def draw_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Gaussian numbers of variance one, complex ones for a complex tensor."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return torch.randn(tensor.shape, generator=generator, dtype=wide).to(tensor.device, tensor.dtype)


def count_not_finite(tensors: Iterable[Tensor]) -> tuple[int, int]:
    """Count the elements that are not finite, and all elements."""
    held = list(tensors)
    return sum(int((~each.detach().isfinite()).sum()) for each in held), sum(each.numel() for each in held)


def measure_size(tensor: Tensor) -> float:
    """Root mean square of the finite elements; one if that is zero."""
    finite = tensor[tensor.isfinite()].abs().double()
    size = float(finite.square().mean().sqrt()) if finite.numel() else 0.0
    return size or 1.0


# ---- precision ----


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision of one dtype.

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
