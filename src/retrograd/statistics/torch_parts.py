"""What a flat tensor adds to a row, by torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from retrograd.statistics.row import BINS

PART = ("nan", "pos_inf", "neg_inf", "zeros", "n", "sum", "m2", "abs_sum", "reference", "min", "max")
"""Columns of a part, a floating tensor of this length: those of a row, with ``n`` for the finite elements."""

EXPONENT = {torch.float64: (torch.int64, 52, 0x7FF, 1023 - 127), torch.float32: (torch.int32, 23, 0xFF, 0)}
"""Of a floating dtype: an integer dtype of its size, shift and mask of the exponent in its bits, and what to take
from that to have the bin."""

SQUARE_MIN, SQUARE_MAX = 1e-11, 1e17
"""Between these, squares of what float32 can tell apart are normal numbers."""


def read_carefully(x: Tensor, reference: Tensor | None) -> Tensor:
    """Make a part of elements of any size, finite or not, without waiting for the device.

    Args:
        x: flat, not empty, in the dtype to compute in.
        reference: what an update was added to, of which the squares are summed.
    """
    finite = x.isfinite()
    kept = torch.where(finite, x, 0)
    n = finite.sum().to(x.dtype)
    total = kept.sum()
    m2 = torch.where(finite, x - total / n, 0).square_().sum()
    squares = torch.zeros_like(n) if reference is None else _finite_squares(reference)
    low = torch.where(finite, x, float("inf")).min()
    high = torch.where(finite, x, -float("inf")).max()
    counts = [count.sum().to(x.dtype) for count in (x.isnan(), x.isposinf(), x.isneginf(), x == 0)]
    return torch.stack([*counts, n, total, m2, kept.abs().sum(), squares, low, high])


def read_fast(x: Tensor, reference: Tensor | None) -> Tensor | None:
    """Make a part of float32 elements on the CPU; None where float32 is not good enough for them.

    Args:
        x: flat and not empty.
        reference: as in :func:`read_carefully`.
    """
    n = x.numel()
    apart = x - (mean := x.mean())
    zero = torch.eq(x, 0, out=torch.empty_like(x))  # as numbers, which add up faster than truths
    sums = [mean, apart.sum(), apart.square_().sum(), x.abs().sum(), zero.sum(), *x.aminmax()]
    mean_, rest, squares, abs_sum, zeros, low, high = [each.item() for each in sums]  # nothing to wait for on the CPU
    largest = max(-low, high)
    if not (SQUARE_MIN < largest < SQUARE_MAX or largest == 0) or squares != squares:
        return None
    known = 0.0 if reference is None else _finite_squares(reference).item()
    m2 = max(0.0, squares - rest * rest / n)
    return torch.tensor([0, 0, 0, zeros, n, mean_ * n + rest, m2, abs_sum, known, low, high], dtype=torch.float64)


def count_exponents(x: Tensor, zeros: Tensor) -> Tensor:
    """Count the exponents of flat elements, of which so many are zeros.

    Returns:
        int64 [256], the exponent histogram and a last bin for those that are not finite.
    """
    integer, shift, mask, offset = EXPONENT[x.dtype]
    bins = (x.view(integer) >> shift).bitwise_and_(mask)
    if offset:
        bins = torch.where(bins == mask, BINS, (bins - offset).clamp_(0, BINS - 1))
    if x.device.type == "cpu":
        counts = torch.bincount(bins, minlength=BINS + 1)
    else:
        ones = torch.ones(1, dtype=torch.int64, device=x.device).expand(len(bins))
        counts = ones.new_zeros(BINS + 1).index_add_(0, bins, ones)
    counts[0] -= zeros.to(torch.int64)
    return counts


def _finite_squares(x: Tensor) -> Tensor:
    return x.nan_to_num(0, 0, 0).square_().sum()
