"""A slab in torch operations alone: for any device, and where the compiled kernel is missing."""

from __future__ import annotations

from itertools import repeat
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from retrograd.statistics.pieces import drop_repeats, split_flat
from retrograd.statistics.readable import make_readable
from retrograd.statistics.row import BINS, ROW
from retrograd.statistics.torch_parts import COUNTS, EXPONENT, MOMENTS, Part, read_carefully, read_fast

EMPTY = (0.0, 0.0, 0.0, 0.0, 0.0, float("inf"), -float("inf"))
N, SUM, M2, LOW, HIGH = (MOMENTS.index(name) for name in ("n", "sum", "m2", "min", "max"))

WIDE = frozenset({torch.float64, torch.int32, torch.int64})
"""Dtypes with elements that float32 cannot tell apart."""

CHUNK_ON_CPU = 1 << 17
CHUNK_ELSEWHERE = 1 << 22
"""Elements that are read at once: temporaries stay small, and on the CPU in its cache."""


class TorchSlab:
    """Rows as tensors on the device of what they tell about.

    Nothing waits for the device except :meth:`drain`, which transfers once. Arithmetic is in float64, or in
    float32 on devices that have no float64.

    Args:
        device: where the tensors live that it will read.
        histogram: count binary exponents too.
    """

    def __init__(self, device: str | torch.device = "cpu", histogram: bool = True) -> None:
        self.device = torch.device(device)
        self.histogram = histogram
        self._real = torch.float32 if self.device.type == "mps" else torch.float64
        self._chunk = CHUNK_ON_CPU if self.device.type == "cpu" else CHUNK_ELSEWHERE
        self._lock = Lock()
        self._calls: list[int] = []
        self._sizes: list[int] = []
        self._counts = torch.empty((0, len(COUNTS)), dtype=torch.int64, device=self.device)
        self._moments = torch.empty((0, len(MOMENTS)), dtype=self._real, device=self.device)
        self._bins = torch.empty((0, BINS + 1 if histogram else 0), dtype=torch.int64, device=self.device)

    def __len__(self) -> int:
        return len(self._calls)

    def grow(self, n: int, /) -> None:
        more = n - len(self)
        if more <= 0:
            return
        with self._lock, torch.inference_mode(False), torch.no_grad():
            empty = torch.tensor(EMPTY, dtype=self._real, device=self.device)
            self._calls += [0] * more
            self._sizes += [0] * more
            self._moments = torch.cat([self._moments, empty.expand(more, -1)])
            self._counts = torch.cat([self._counts, self._counts.new_zeros((more, len(COUNTS)))])
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
            rows = np.zeros(len(used), dtype=ROW)
            rows["row"], rows["calls"], rows["count"] = used, np.take(self._calls, used), np.take(self._sizes, used)
            bits = self._moments.view(EXPONENT[self._real][0]).to(torch.int64)
            host = torch.cat([self._counts, bits, self._bins], dim=1).cpu()[torch.from_numpy(used)]
            self._clear()
        counts, bits, bins = torch.tensor_split(host, (len(COUNTS), len(COUNTS) + len(MOMENTS)), dim=1)
        moments = bits.to(EXPONENT[self._real][0]).contiguous().view(self._real)
        for name, column in (*zip(COUNTS, counts.T, strict=True), *zip(MOMENTS[1:], moments.T[1:], strict=True)):
            rows[name] = column.numpy()
        return _pack(rows, bins[:, :BINS].numpy())

    def forget(self) -> None:
        with self._lock, torch.no_grad():
            self._clear()

    def _check(self, row: int) -> None:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a slab of {len(self)} rows")

    def _read(self, new: Tensor, old: Tensor | None, row: int) -> None:
        """Merge ``new``, or ``new − old``, into a row and count the call."""
        elements, repeats = drop_repeats(new)
        if elements.numel():
            self._fold(elements, None if old is None else drop_repeats(old)[0], row, repeats)
        self._calls[row] += 1
        self._sizes[row] += elements.numel() * repeats

    def _fold(self, new: Tensor, old: Tensor | None, row: int, repeats: int) -> None:
        """Merge what is not empty into a row, as often as each element is repeated."""
        exact = self._real if new.dtype in WIDE else torch.float32
        before_pieces = repeat(None) if old is None else split_flat(old, self._chunk)
        for after, before in zip(split_flat(new, self._chunk), before_pieces, strict=False):
            x = after.to(exact) if before is None else after.to(exact) - before.to(exact)
            reference = None if before is None else before.to(self._real)
            part = None
            if exact is torch.float32 and self.device.type == "cpu":
                part = read_fast(x, reference, histogram=self.histogram)
            if part is None:
                part = read_carefully(x.to(self._real), reference, histogram=self.histogram)
            self._merge(part, row, repeats)

    def _merge(self, part: Part, row: int, repeats: int) -> None:
        self._counts[row] += part.counts * repeats
        if part.bins is not None:
            self._bins[row] += part.bins * repeats
        whole, moments = self._moments[row], part.moments
        n, k = whole[N], moments[N] * repeats
        apart = torch.where((n > 0) & (k > 0), moments[SUM] / moments[N] - whole[SUM] / n, 0)
        whole[M2] += apart.square_() * torch.where(n + k > 0, n * k / (n + k), 0)
        whole[:LOW] += moments[:LOW] * repeats
        whole[LOW] = torch.minimum(whole[LOW], moments[LOW])
        whole[HIGH] = torch.maximum(whole[HIGH], moments[HIGH])

    def _clear(self) -> None:
        self._calls = [0] * len(self)
        self._sizes = [0] * len(self)
        self._counts.zero_()
        self._bins.zero_()
        self._moments[:, :LOW] = 0
        self._moments[:, LOW] = float("inf")
        self._moments[:, HIGH] = -float("inf")


def _pack(rows: npt.NDArray[np.void], bins: npt.NDArray[np.int64]) -> tuple[bytes, bytes]:
    """Set the stretch of each row, and make bytes of rows and stretches."""
    stretches = []
    for row, counts in zip(rows, bins, strict=True):
        used = np.flatnonzero(counts)
        if used.size:
            row["first_bin"], row["bins"] = used[0], used[-1] + 1 - used[0]
            stretches.append(counts[used[0] : used[-1] + 1].tobytes())
    return rows.tobytes(), b"".join(stretches)
