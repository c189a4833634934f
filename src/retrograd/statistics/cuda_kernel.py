"""One tensor into one row on a CUDA device: two Triton kernels, without an atomic addition.

Each program of the first reads blocks of the tensor and writes what it has of the row to scratch memory. The second
is one program: it merges these parts, in an order that does not depend on timing, into the row. So the same
elements give the same bits every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Elements that a program reads at once."""

MOST_PROGRAMS = 1024
PROGRAMS_PER_PROCESSOR = 4

PART = tl.constexpr(11)
"""Numbers of a part: the counts of a row, then its moments, as :mod:`retrograd.statistics.torch_slab` orders them."""


@triton.jit
def read_parts(
    new, old, parts, part_bins, n,
    UPDATE: tl.constexpr, WIDE: tl.constexpr, HISTOGRAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read every so-many-th block of ``new``, or of ``new − old``."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    nans = tl.zeros((), tl.float64)
    pos_infs, neg_infs, zeros = nans, nans, nans
    count, total, m2, abs_total, reference = nans, nans, nans, nans, nans
    low = nans + float("inf")
    high = -low
    bins = tl.zeros((256,), tl.int32)
    for start in range(program * BLOCK, n, programs * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < n
        x = tl.load(new + at, mask=inside, other=0)
        x = x.to(tl.float64) if WIDE else x.to(tl.float32)
        if UPDATE:
            before = tl.load(old + at, mask=inside, other=0).to(tl.float64)
            x = (x - before) if WIDE else (x - before.to(tl.float32))
            known = (before == before) & (tl.abs(before) < float("inf"))
            reference += tl.sum(tl.where(known, before * before, 0.0), 0)

        if WIDE:
            bits = x.to(tl.int64, bitcast=True)
            magnitude = bits & 0x7FFFFFFFFFFFFFFF
            infinity = 0x7FF0000000000000
            exponent = tl.minimum(tl.maximum((magnitude >> 52) - 896, 0), 254)
        else:
            bits = x.to(tl.int32, bitcast=True)
            magnitude = bits & 0x7FFFFFFF
            infinity = 0x7F800000
            exponent = magnitude >> 23
        finite = inside & (magnitude < infinity)
        infinite = inside & (magnitude == infinity)
        zero = inside & (magnitude == 0)
        nans += tl.sum((inside & (magnitude > infinity)).to(tl.int32), 0)
        pos_infs += tl.sum((infinite & (bits > 0)).to(tl.int32), 0)
        neg_infs += tl.sum((infinite & (bits < 0)).to(tl.int32), 0)
        zeros += tl.sum(zero.to(tl.int32), 0)
        if HISTOGRAM:
            bins += tl.histogram(tl.where(finite & ~zero, exponent, 255).to(tl.int32), 256)

        # A power of two brings the largest magnitude to 1, so that squares of float32 stay in range.
        if WIDE:
            scale = 1.0
        else:
            largest = tl.max(tl.where(finite, magnitude, 0), 0) >> 23
            scale = ((254 - tl.minimum(tl.maximum(largest, 1), 253)) << 23).to(tl.float32, bitcast=True)
        unit = 1.0 / (tl.zeros((), tl.float64) + scale)
        scaled = tl.where(finite, x, 0.0) * scale
        k = tl.sum(finite.to(tl.int32), 0).to(tl.float64)
        some = tl.maximum(k, 1.0)
        mean = (tl.sum(scaled, 0).to(tl.float64) / some).to(x.dtype)
        apart = tl.where(finite, scaled - mean, 0.0)
        rest = tl.sum(apart, 0).to(tl.float64)
        block_m2 = (tl.sum(apart * apart, 0).to(tl.float64) - rest * rest / some) * unit * unit
        block_total = (mean.to(tl.float64) * k + rest) * unit

        both = (k > 0) & (count > 0)
        gap = tl.where(both, block_total / some - total / tl.maximum(count, 1.0), 0.0)
        m2 += tl.maximum(block_m2, 0.0) + gap * gap * (k * count / tl.maximum(k + count, 1.0))
        count += k
        total += block_total
        abs_total += tl.sum(tl.abs(scaled), 0).to(tl.float64) * unit
        low = tl.minimum(low, tl.min(tl.where(finite, x, float("inf")), 0).to(tl.float64))
        high = tl.maximum(high, tl.max(tl.where(finite, x, -float("inf")), 0).to(tl.float64))

    part = parts + program * PART
    tl.store(part, nans)
    tl.store(part + 1, pos_infs)
    tl.store(part + 2, neg_infs)
    tl.store(part + 3, zeros)
    tl.store(part + 4, count)
    tl.store(part + 5, total)
    tl.store(part + 6, m2)
    tl.store(part + 7, abs_total)
    tl.store(part + 8, reference)
    tl.store(part + 9, low)
    tl.store(part + 10, high)
    if HISTOGRAM:
        tl.store(part_bins + program * 256 + tl.arange(0, 256), bins)


@triton.jit
def merge_parts(
    parts, part_bins, programs, repeats, counts, moments, row_bins,
    HISTOGRAM: tl.constexpr, PARTS: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Merge all parts, as often as elements are repeated, into one row."""
    at = tl.arange(0, PARTS)
    inside = at < programs
    part = parts + at * PART
    times = tl.zeros((), tl.float64) + repeats
    for column in tl.static_range(4):
        found = tl.sum(tl.load(part + column, mask=inside, other=0.0), 0) * times
        tl.store(counts + column, tl.load(counts + column) + found.to(tl.int64))

    n = tl.load(part + 4, mask=inside, other=0.0)
    totals = tl.load(part + 5, mask=inside, other=0.0)
    count, total = tl.sum(n, 0), tl.sum(totals, 0)
    mean = total / tl.maximum(count, 1.0)
    gaps = tl.where(n > 0, totals / tl.maximum(n, 1.0) - mean, 0.0)
    m2 = tl.sum(tl.load(part + 6, mask=inside, other=0.0) + gaps * gaps * n, 0) * times
    count *= times
    total *= times

    row_count, row_total = tl.load(moments), tl.load(moments + 1)
    both = (count > 0) & (row_count > 0)
    gap = tl.where(both, mean - row_total / tl.maximum(row_count, 1.0), 0.0)
    m2 += gap * gap * (count * row_count / tl.maximum(count + row_count, 1.0))
    tl.store(moments, row_count + count)
    tl.store(moments + 1, row_total + total)
    tl.store(moments + 2, tl.load(moments + 2) + m2)
    for column in tl.static_range(3, 5):
        added = tl.sum(tl.load(part + 4 + column, mask=inside, other=0.0), 0) * times
        tl.store(moments + column, tl.load(moments + column) + added)
    low = tl.min(tl.load(part + 9, mask=inside, other=float("inf")), 0)
    high = tl.max(tl.load(part + 10, mask=inside, other=-float("inf")), 0)
    tl.store(moments + 5, tl.minimum(tl.load(moments + 5), low))
    tl.store(moments + 6, tl.maximum(tl.load(moments + 6), high))

    if HISTOGRAM:
        bin = tl.arange(0, 256)
        found = tl.zeros((256,), tl.int64)
        for first in range(0, programs, LINES):
            line = first + tl.arange(0, LINES)
            block = part_bins + line[:, None] * 256 + bin[None, :]
            found += tl.sum(tl.load(block, mask=(line < programs)[:, None], other=0).to(tl.int64), 0)
        tl.store(row_bins + bin, tl.load(row_bins + bin) + found * repeats)


def count_programs(device: torch.device) -> int:
    """How many programs keep a device busy."""
    return min(MOST_PROGRAMS, PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count)


def merge_into_row(
    new: Tensor, old: Tensor | None, repeats: int, counts: Tensor, moments: Tensor, bins: Tensor, programs: int
) -> None:
    """Merge the elements of ``new``, or of ``new − old``, into a row.

    Args:
        new: flat and dense, not empty.
        old: of the same dtype and length.
        repeats: how often each element counts.
        counts: int64 [4] of the row.
        moments: float64 [7] of the row.
        bins: int64 [256] of the row, or [0] when exponents are not counted.
        programs: how many may run at once.
    """
    if new.dtype is torch.bool:
        new, old = new.view(torch.uint8), None if old is None else old.view(torch.uint8)
    programs = min(programs, triton.cdiv(new.numel(), BLOCK))
    histogram = bins.numel() > 0
    parts = torch.empty((programs, PART.value), dtype=torch.float64, device=new.device)
    part_bins = torch.empty((programs, 256 if histogram else 0), dtype=torch.int32, device=new.device)
    wide = new.dtype in (torch.float64, torch.int32, torch.int64)
    with torch.cuda.device_of(new):
        read_parts[(programs,)](
            new, new if old is None else old, parts, part_bins, new.numel(),
            UPDATE=old is not None, WIDE=wide, HISTOGRAM=histogram, BLOCK=BLOCK,
        )  # fmt: skip
        merge_parts[(1,)](
            parts, part_bins, programs, repeats, counts, moments, bins,
            HISTOGRAM=histogram, PARTS=triton.next_power_of_2(programs), LINES=16,
        )  # fmt: skip
