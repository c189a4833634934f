"""A slab in torch operations alone: for any device, and where the compiled kernel is missing."""

from __future__ import annotations

from array import array
from itertools import repeat
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from retrograd.statistics.pieces import drop_repeats, split_flat
from retrograd.statistics.readable import make_readable
from retrograd.statistics.row import BINS, ROW, merge_rows
from retrograd.statistics.torch_parts import EXPONENT, PART, count_exponents, read_carefully, read_fast

ZEROS, LOW = PART.index("zeros"), PART.index("min")

WIDE = frozenset({torch.float64, torch.int32, torch.int64})
"""Dtypes with elements that float32 cannot tell apart."""

CHUNK_ON_CPU = 1 << 16
CHUNK_ELSEWHERE = 1 << 22
"""Elements that are read at once: temporaries stay small, and on the CPU in its cache."""


def make_turns() -> array[int]:
    """What counts the rows that are reached."""
    return array("q", [0])


class TorchSlab:
    """Parts of rows on the device of what they tell about, merged into rows when they are drained.

    Nothing waits for the device except :meth:`drain`, which transfers once. Arithmetic is in float64, or in
    float32 on devices that have no float64.

    Args:
        device: where the tensors live that it will read.
        histogram: count binary exponents too.
        turns: what counts the rows that are reached.
    """

    def __init__(
        self, device: str | torch.device = "cpu", histogram: bool = True, turns: array[int] | None = None
    ) -> None:
        self.device = torch.device(device)
        self.histogram = histogram
        self._real = torch.float32 if self.device.type == "mps" else torch.float64
        self._chunk = CHUNK_ON_CPU if self.device.type == "cpu" else CHUNK_ELSEWHERE
        self._lock = Lock()
        self._turns = make_turns() if turns is None else turns
        self._calls: list[int] = []
        self._orders: list[int] = []
        self._parts: list[Tensor] = []
        self._part_rows: list[int] = []
        self._part_repeats: list[int] = []
        self._bins = torch.empty((0, BINS + 1 if histogram else 0), dtype=torch.int64, device=self.device)

    def __len__(self) -> int:
        return len(self._calls)

    def grow(self, n: int, /) -> None:
        more = n - len(self)
        if more <= 0:
            return
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self._calls += [0] * more
            self._orders += [0] * more
            self._bins = torch.cat([self._bins, self._bins.new_zeros((more, self._bins.size(1)))])

    def observe(self, tensor: Tensor, row: int, /) -> bool:
        self._check(row)
        with self._lock, torch.no_grad():
            self._read(make_readable(tensor, self.device), None, row)
        return tensor.requires_grad

    def observe_update(self, new: Tensor, old: Tensor, row: int, /) -> None:
        self._check(row)
        with self._lock, torch.no_grad():
            new, old = make_readable(new, self.device), make_readable(old, self.device)
            if new.shape != old.shape or new.dtype != old.dtype:
                raise ValueError("an update is the difference of two tensors of one size and dtype")
            if new.stride() != old.stride():
                new, old = new.contiguous(), old.contiguous()
            self._read(new, old, row)

    def drain(self) -> tuple[bytes, bytes]:
        with self._lock, torch.no_grad():
            used = np.flatnonzero(self._calls)
            parts, bins = self._transfer()
            rows = np.zeros(len(used), dtype=ROW)
            rows["row"] = used
            merged = merge_rows(_columns(parts), np.searchsorted(used, self._part_rows), len(used))
            merged["calls"] = np.take(self._calls, used)
            merged["order"] = np.take(self._orders, used)
            for name, column in merged.items():
                rows[name] = column
            self._clear()
        return _pack(rows, bins[used, :BINS])

    def forget(self) -> None:
        with self._lock, torch.no_grad():
            self._clear()

    def _check(self, row: int) -> None:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a slab of {len(self)} rows")

    def _read(self, new: Tensor, old: Tensor | None, row: int) -> None:
        """Take in ``new``, or ``new − old``, and count the call."""
        elements, repeats = drop_repeats(new)
        if elements.numel():
            self._fold(elements, None if old is None else drop_repeats(old)[0], row, repeats)
        if not self._calls[row]:
            self._orders[row] = self._turns[0]
            self._turns[0] += 1
        self._calls[row] += 1

    def _fold(self, new: Tensor, old: Tensor | None, row: int, repeats: int) -> None:
        """Make parts of what is not empty, and of which each element counts as often as it is repeated."""
        exact = self._real if new.dtype in WIDE else torch.float32
        fast = exact is torch.float32 and self.device.type == "cpu"
        before_pieces = repeat(None) if old is None else split_flat(old, self._chunk)
        for after, before in zip(split_flat(new, self._chunk), before_pieces, strict=False):
            x = after.to(exact) if before is None else after.to(exact) - before.to(exact)
            reference = None if before is None else before.to(self._real)
            part = read_fast(x, reference) if fast else None
            if part is None:
                part = read_carefully(x.to(self._real), reference)
            bins = count_exponents(x, part[ZEROS]) if self.histogram else None
            self._add(row, part, bins, repeats)

    def _add(self, row: int, part: Tensor, bins: Tensor | None, repeats: int) -> None:
        self._parts.append(part)
        self._part_rows.append(row)
        self._part_repeats.append(repeats)
        if bins is not None:
            self._bins[row] += bins * repeats

    def _transfer(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """All parts, repeated, and all bins, on the host."""
        integer = EXPONENT[self._real][0]
        parts = torch.stack(self._parts) if self._parts else self._bins.new_empty((0, len(PART)), dtype=self._real)
        host = torch.cat([parts.view(integer).to(torch.int64).flatten(), self._bins.flatten()]).cpu()
        bits, bins = host[: parts.numel()], host[parts.numel() :]
        numbers = bits.to(integer).view(self._real).double().reshape(parts.shape).numpy()
        numbers[:, :LOW] *= np.array(self._part_repeats, dtype=np.float64)[:, None]
        return numbers, bins.reshape(self._bins.shape).numpy()

    def _clear(self) -> None:
        self._calls = [0] * len(self)
        self._turns[0] = 0
        self._parts, self._part_rows, self._part_repeats = [], [], []
        self._bins.zero_()


def _columns(parts: npt.NDArray[np.float64]) -> dict[str, npt.NDArray[Any]]:
    """Columns of rows from those of parts."""
    columns = dict(zip(PART, parts.T, strict=True))
    columns["count"] = columns.pop("n") + columns["nan"] + columns["pos_inf"] + columns["neg_inf"]
    return columns | dict.fromkeys(("calls", "order"), np.zeros(len(parts), np.int64))


def _pack(rows: npt.NDArray[np.void], bins: npt.NDArray[np.int64]) -> tuple[bytes, bytes]:
    """Set the stretch of each row, and make bytes of rows and stretches."""
    stretches = []
    for row, counts in zip(rows, bins, strict=True):
        used = np.flatnonzero(counts)
        if used.size:
            row["first_bin"], row["bins"] = used[0], used[-1] + 1 - used[0]
            stretches.append(counts[used[0] : used[-1] + 1].tobytes())
    return rows.tobytes(), b"".join(stretches)
