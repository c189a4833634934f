"""Inner products, random vectors and sizes, for tensors as vectors of all their elements."""

from __future__ import annotations

from collections.abc import Iterable

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
    """How many elements are not finite, and how many there are."""
    held = list(tensors)
    return sum(int((~each.detach().isfinite()).sum()) for each in held), sum(each.numel() for each in held)


def measure_size(tensor: Tensor) -> float:
    """Root mean square of the finite elements; one if that is zero."""
    finite = tensor[tensor.isfinite()].abs().double()
    size = float(finite.square().mean().sqrt()) if finite.numel() else 0.0
    return size or 1.0
