"""Numbers of tensors that are looked at: read now, without waiting for a device, and collected later."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from retrograd.hooks.storages import first_bytes
from retrograd.statistics.row import ROW
from retrograd.statistics.slab import Slab, UnreadableTensorError, make_slab

_FIELDS: Mapping[str, Any] = ROW.fields or {}
_BEGIN, _END = _FIELDS["count"][1], _FIELDS["reference"][1]
"""The part of a row that tells of what was read."""


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
        digest: the same for the same values in the same order; empty where none was asked for.
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
        self._heads: list[bytes | Tensor | None] = []

    def __len__(self) -> int:
        return len(self._heads)

    def read(self, tensor: Tensor, *, has_digest: bool = True) -> int | None:
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
        self._heads.append(first_bytes(tensor) if has_digest else None)
        return number

    def collect(self) -> dict[int, TensorReading]:
        """All that was read, by number. This waits for the devices; numbers begin anew."""
        heads, self._heads = self._heads, []
        found: dict[int, TensorReading] = {}
        if heads:
            for slab in self._slabs.values():
                rows, _ = slab.drain()
                found.update(_understand(rows, heads))
        return found


def _understand(rows: bytes, heads: list[bytes | Tensor | None]) -> Iterator[tuple[int, TensorReading]]:
    table = np.frombuffer(rows, ROW)
    numbers = table["row"].tolist()
    nonfinite = table["nan"] + table["pos_inf"] + table["neg_inf"]
    n = (table["count"] - nonfinite).astype(np.float64)
    n[n == 0] = np.nan
    with np.errstate(all="ignore"):
        mean, variance = table["sum"] / n, table["m2"] / n
        rms = np.sqrt(variance + mean * mean)
    low, high = (np.where(np.isnan(n), np.nan, table[name]) for name in ("min", "max"))
    columns = (table["count"], nonfinite, table["zeros"], mean, np.sqrt(variance), rms, low, high)
    digests = [_digest(rows, place, heads[number]) for place, number in enumerate(numbers)]
    readings = map(TensorReading, *(column.tolist() for column in columns), digests)
    return zip(numbers, readings, strict=True)


def _digest(rows: bytes, place: int, head: bytes | Tensor | None) -> str:
    if head is None:
        return ""
    if isinstance(head, Tensor):
        head = bytes(head.cpu().numpy())
    begin = place * ROW.itemsize
    return f"{zlib.crc32(rows[begin + _BEGIN : begin + _END], zlib.crc32(head)):08x}"
