"""Two Triton kernels that read a tensor on a CUDA device once, and make what it adds to a row.

Each program of the first reads blocks of the tensor, writes its part to a line of memory that waits for it, and adds
what it has counted to a histogram. The second merges the parts of many readings, a program each. No sum of floating
numbers is taken in an order that depends on timing, so the same elements give the same bits every time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Elements that a program reads at once."""

MOST_PROGRAMS = 1024
PROGRAMS_PER_PROCESSOR = 4

PART = tl.constexpr(11)
"""Columns of a part, those of :data:`retrograd.core.statistics.torch_slab.PART`."""


@triton.jit(do_not_specialize=["n", "line", "row", "repeats"])
def read_parts(
    new, old, parts, bins, n, line, row, repeats,
    UPDATE: tl.constexpr, WIDE: tl.constexpr, HISTOGRAM: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read every so-many-th block of ``new``, or of ``new − old``: a part for each program, in lines from ``line`` on.

    What is counted goes into the line ``row`` of ``bins``, so many times.
    """
    if EVEN:
        n = n // 16 * 16  # it is already; so the compiler knows that it may load 16 bytes at once
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    nans = tl.zeros((), tl.float64)
    pos_infs, neg_infs, zeros = nans, nans, nans
    count, total, m2, abs_total, reference = nans, nans, nans, nans, nans
    low = nans + float("inf")
    high = -low
    found = tl.zeros((256,), tl.int32)
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
            found += tl.histogram(tl.where(finite & ~zero, exponent, 255).to(tl.int32), 256)

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

    part = parts + (line + program) * PART
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
        to = bins + row.to(tl.int64) * 256 + tl.arange(0, 256)
        tl.atomic_add(to, found.to(tl.int64) * repeats, mask=found > 0, sem="relaxed")


@triton.jit
def merge_parts(parts, places, merged, PARTS: tl.constexpr):
    """Merge the parts of each reading into one, of which ``places`` has the first line and the number of lines."""
    reading = tl.program_id(0)
    first = tl.load(places + 2 * reading).to(tl.int64)
    at = tl.arange(0, PARTS)
    inside = at < tl.load(places + 2 * reading + 1)
    of = parts + (first + at) * PART
    part = merged + reading.to(tl.int64) * PART
    for column in tl.static_range(4):
        tl.store(part + column, tl.sum(tl.load(of + column, mask=inside, other=0.0), 0))

    n = tl.load(of + 4, mask=inside, other=0.0)
    totals = tl.load(of + 5, mask=inside, other=0.0)
    count, total = tl.sum(n, 0), tl.sum(totals, 0)
    gaps = tl.where(n > 0, totals / tl.maximum(n, 1.0) - total / tl.maximum(count, 1.0), 0.0)
    tl.store(part + 4, count)
    tl.store(part + 5, total)
    tl.store(part + 6, tl.sum(tl.load(of + 6, mask=inside, other=0.0) + gaps * gaps * n, 0))
    tl.store(part + 7, tl.sum(tl.load(of + 7, mask=inside, other=0.0), 0))
    tl.store(part + 8, tl.sum(tl.load(of + 8, mask=inside, other=0.0), 0))
    tl.store(part + 9, tl.min(tl.load(of + 9, mask=inside, other=float("inf")), 0))
    tl.store(part + 10, tl.max(tl.load(of + 10, mask=inside, other=-float("inf")), 0))


def count_programs(device: torch.device) -> int:
    """The number of programs that keep a device busy."""
    return min(MOST_PROGRAMS, PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count)


class Target(NamedTuple):
    """Where a reading goes.

    Attributes:
        parts: float64 [lines, 11], a part for each program.
        line: the first that it writes, of as many that are free as programs may run.
        bins: int64 [rows, 256], or [rows, 0] where nothing is counted.
        row: whose bins it adds to.
    """

    parts: Tensor
    line: int
    bins: Tensor
    row: int


def read_on_device(new: Tensor, old: Tensor | None, to: Target, repeats: int, programs: int) -> tuple[int, Any]:
    """Read the elements of ``new``, or of ``new − old``, without waiting for the device.

    Args:
        new: flat and dense, not empty.
        old: of the same dtype and length.
        to: where it goes.
        repeats: how often each element counts in the bins.
        programs: how many may run at once.

    Returns:
        How many have run, and the compiled kernel; None in Triton's interpreter.
    """
    if new.dtype is torch.bool:
        new, old = new.view(torch.uint8), None if old is None else old.view(torch.uint8)
    programs = min(programs, triton.cdiv(new.numel(), BLOCK))
    wide = new.dtype in (torch.float64, torch.int32, torch.int64)
    with torch.cuda.device_of(new):
        kernel = read_parts[(programs,)](
            new, new if old is None else old, to.parts, to.bins, new.numel(), to.line, to.row, repeats,
            UPDATE=old is not None, WIDE=wide, HISTOGRAM=to.bins.size(1) > 0, EVEN=new.numel() % 16 == 0, BLOCK=BLOCK,
        )  # fmt: skip
    return programs, kernel


def merge_on_device(parts: Tensor, places: Tensor, programs: int) -> Tensor:
    """Merge the parts of readings, without waiting for the device.

    Args:
        parts: those of :class:`Target`.
        places: int32 [readings, 2], of each the first line and how many there are.
        programs: more than any has.

    Returns:
        float64 [readings, 11].
    """
    merged = parts.new_empty((len(places), PART.value))
    with torch.cuda.device_of(parts):
        merge_parts[(len(places),)](parts, places, merged, PARTS=triton.next_power_of_2(programs))
    return merged
