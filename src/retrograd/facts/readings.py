"""Numbers of tensors that are looked at: read now, without waiting for a device, and collected later."""

from __future__ import annotations

import math
import zlib
from functools import cache
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from retrograd.hooks.memory import first_bytes
from retrograd.statistics.row import ROW
from retrograd.statistics.slab import Slab, UnreadableTensorError, make_slab

_ROW = Struct("<iiqqqqqqddddddii")
assert _ROW.size == ROW.itemsize
_CONTENT = slice(ROW.fields["count"][1], ROW.fields["reference"][1]) if ROW.fields else slice(0)


@cache
def name_type(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")


class TensorReading(NamedTuple):
    """What was read of a tensor.

    Attributes:
        elements: how many.
        nonfinite, zeros: elements that are not finite, or zero.
        mean, std, rms, min, max: of the finite ones; NaN where there is none.
        digest: the same for the same values in the same order.
    """

    elements: int
    nonfinite: int
    zeros: int
    mean: float
    std: float
    rms: float
    min: float
    max: float
    digest: str


class Readings:
    """Tensors that have been read and are not collected yet, each with a number."""

    def __init__(self) -> None:
        self._slabs: dict[torch.device, Slab] = {}
        self._heads: list[bytes | Tensor] = []

    def __len__(self) -> int:
        return len(self._heads)

    def read(self, tensor: Tensor) -> int | None:
        """Read a tensor as it is now; returns its number, None if it has no elements that can be read."""
        number = len(self._heads)
        try:
            slab = self._slabs.get(tensor.device)
            if slab is None:
                slab = self._slabs[tensor.device] = make_slab(tensor.device, histogram=False)
            if len(slab) <= number:
                slab.grow(2 * number + 16)
            slab.observe(tensor, number)
        except UnreadableTensorError:
            return None
        self._heads.append(first_bytes(tensor))
        return number

    def collect(self) -> dict[int, TensorReading]:
        """All that was read, by number. This waits for the devices; numbers begin anew."""
        heads, self._heads = self._heads, []
        found: dict[int, TensorReading] = {}
        if heads:
            for slab in self._slabs.values():
                rows, _ = slab.drain()
                for place in range(0, len(rows), _ROW.size):
                    row = rows[place : place + _ROW.size]
                    number, reading = _understand(row, heads)
                    found[number] = reading
        return found


def _understand(row: bytes, heads: list[bytes | Tensor]) -> tuple[int, TensorReading]:
    number, _, _, count, nan, pos_inf, neg_inf, zeros, total, m2, _, low, high, *_ = _ROW.unpack(row)
    head = heads[number]
    if isinstance(head, Tensor):
        head = bytes(head.cpu().numpy())
    nonfinite = nan + pos_inf + neg_inf
    n = count - nonfinite
    mean = total / n if n else math.nan
    return number, TensorReading(
        elements=count,
        nonfinite=nonfinite,
        zeros=zeros,
        mean=mean,
        std=math.sqrt(m2 / n) if n else math.nan,
        rms=math.sqrt(m2 / n + mean * mean) if n else math.nan,
        min=low if n else math.nan,
        max=high if n else math.nan,
        digest=f"{zlib.crc32(row[_CONTENT], zlib.crc32(head)):08x}",
    )
