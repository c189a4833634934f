"""What a flat tensor adds to a row, by torch operations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from retrograd.statistics.row import BINS

COUNTS = ("nan", "pos_inf", "neg_inf", "zeros")
MOMENTS = ("n", "sum", "m2", "abs_sum", "reference", "min", "max")

EXPONENT = {torch.float64: (torch.int64, 52, 0x7FF, 1023 - 127), torch.float32: (torch.int32, 23, 0xFF, 0)}
"""Of a floating dtype: an integer dtype of its size, shift and mask of the exponent in its bits, and what to take
from that to have the bin."""

SQUARE_MIN, SQUARE_MAX = 1e-11, 1e17
"""Between these, squares of what float32 can tell apart are normal numbers."""


class Part(NamedTuple):
    """Some of the elements of a row.

    Attributes:
        counts: the columns :data:`COUNTS`, int64 [4].
        moments: the columns :data:`MOMENTS`, floating [7].
        bins: of the exponent histogram, int64 [256]; the last holds what has no exponent. None: not counted.
    """

    counts: Tensor
    moments: Tensor
    bins: Tensor | None


def read_carefully(x: Tensor, reference: Tensor | None, *, histogram: bool) -> Part:
    """Read elements of any size, finite or not, without waiting for the device.

    Args:
        x: flat, not empty, in the dtype to compute in.
        reference: what an update was added to, of which the squares are summed.
        histogram: count exponents.
    """
    finite = x.isfinite()
    kept = torch.where(finite, x, 0)
    zeros = x == 0
    counts = torch.stack([x.isnan().sum(), x.isposinf().sum(), x.isneginf().sum(), zeros.sum()])
    n = finite.sum().to(x.dtype)
    total = kept.sum()
    m2 = torch.where(finite, x - total / n, 0).square_().sum()
    squares = torch.zeros_like(n) if reference is None else _finite_squares(reference)
    low = torch.where(finite, x, float("inf")).min()
    high = torch.where(finite, x, -float("inf")).max()
    moments = torch.stack([n, total, m2, kept.abs().sum(), squares, low, high])
    return Part(counts, moments, _count_exponents(x, finite & ~zeros) if histogram else None)


def read_fast(x: Tensor, reference: Tensor | None, *, histogram: bool) -> Part | None:
    """Read float32 elements on the CPU; None where float32 is not good enough for them.

    Args:
        x: flat and not empty.
        reference: as in :func:`read_carefully`.
        histogram: count exponents.
    """
    n = x.numel()
    mean = x.mean()
    apart = x - mean
    zero = torch.eq(x, 0, out=torch.empty_like(x))  # as numbers, which add up faster than truths
    low, high = x.aminmax()
    read = torch.stack([mean, apart.sum(), apart.square().sum(), x.abs().sum(), low, high, zero.sum()])
    mean_, rest, squares, abs_sum, low_, high_, zeros = read.tolist()  # the CPU has nothing to wait for
    largest = max(-low_, high_)
    if not (SQUARE_MIN < largest < SQUARE_MAX or largest == 0) or squares != squares:
        return None
    known = 0.0 if reference is None else float(_finite_squares(reference))
    moments = [n, mean_ * n + rest, max(0.0, squares - rest * rest / n), abs_sum, known, low_, high_]
    counts = torch.tensor([0, 0, 0, int(zeros)])
    return Part(
        counts, torch.tensor(moments, dtype=torch.float64), _count_exponents(x, zero == 0) if histogram else None
    )


def _finite_squares(x: Tensor) -> Tensor:
    return x.nan_to_num(0, 0, 0).square_().sum()


def _count_exponents(x: Tensor, counted: Tensor) -> Tensor:
    integer, shift, mask, offset = EXPONENT[x.dtype]
    bins = ((x.view(integer) >> shift) & mask).sub_(offset).clamp_(0, BINS - 1)
    bins = torch.where(counted, bins, BINS)
    if x.device.type == "cpu":
        return torch.bincount(bins, minlength=BINS + 1)
    ones = torch.ones(1, dtype=torch.int64, device=x.device).expand(len(bins))
    return ones.new_zeros(BINS + 1).index_add_(0, bins, ones)
