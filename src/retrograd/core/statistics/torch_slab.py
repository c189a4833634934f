"""A slab in torch operations alone: for any device, and where the compiled kernel is missing."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from retrograd.core.statistics.readable import make_readable, untraced
from retrograd.core.statistics.row import BINS, ROW, merge_rows


def drop_repeats(tensor: Tensor) -> tuple[Tensor, int]:
    """A tensor without the dimensions it was expanded along, and how often each element that is left appears.

    Dimensions of size 1 go too, and the others are sorted from the largest stride to the smallest.
    """
    repeats = 1
    for dim in reversed(range(tensor.ndim)):
        if tensor.size(dim) == 1 or (tensor.stride(dim) == 0 and tensor.size(dim) > 0):
            repeats *= tensor.size(dim)
            tensor = tensor.select(dim, 0)
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(order), repeats


def split_flat(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """Flat tensors of at most ``size`` elements that together are all elements of a tensor."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        yield from torch.split(tensor.view(-1), size)
        return
    rows = max(1, size * tensor.size(0) // tensor.numel())
    for part in torch.split(tensor, rows):
        yield from torch.split(part.reshape(-1), size)


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


ZEROS, LOW = PART.index("zeros"), PART.index("min")

WIDE = frozenset({torch.float64, torch.int32, torch.int64})
"""Dtypes with elements that float32 cannot tell apart."""

CHUNK_ON_CPU = 1 << 16
CHUNK_ELSEWHERE = 1 << 22
"""Elements that are read at once: temporaries stay small, and on the CPU in its cache."""


def make_turns() -> array[int]:
    """Make the counter of the rows that are reached."""
    return array("q", [0])


@dataclass(frozen=True, slots=True)
class Taken:
    """What a slab held.

    Attributes:
        table: an array of :data:`~retrograd.core.statistics.row.ROW`, of which ``row``, ``calls`` and ``order`` are
            known.
        finish: makes what a slab returns when it is drained of ``numbers``, once these are on the host.
        numbers: int64, on a device; None where everything is known, and ``finish`` takes nothing.
    """

    table: npt.NDArray[np.void]
    finish: Callable[..., tuple[bytes, bytes]]
    numbers: Tensor | None = None


class TorchSlab:
    """Parts of rows on the device of what they tell about, merged into rows when they are drained.

    Nothing waits for the device except :meth:`drain`. Arithmetic is in float64, or in
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
            if n > len(self._bins):
                self._settle()
                room = self._bins.new_zeros((max(n, 2 * len(self._bins)) - len(self._bins), self._bins.size(1)))
                self._bins = torch.cat([self._bins, room])

    def observe(self, tensor: Tensor, row: int, /) -> bool:
        self._check(row)
        with self._lock, torch.no_grad(), untraced():
            self._read(make_readable(tensor, self.device), None, row)
        return tensor.requires_grad

    def observe_update(self, new: Tensor, old: Tensor, row: int, /) -> None:
        self._check(row)
        with self._lock, torch.no_grad(), untraced():
            new, old = make_readable(new, self.device), make_readable(old, self.device)
            if new.shape != old.shape or new.dtype != old.dtype:
                raise ValueError("an update is the difference of two tensors of one size and dtype")
            if new.stride() != old.stride():
                new, old = new.contiguous(), old.contiguous()
            self._read(new, old, row)

    def drain(self) -> tuple[bytes, bytes]:
        taken = self.take()
        assert taken.numbers is not None
        return taken.finish(taken.numbers.cpu().numpy())

    def take(self) -> Taken:
        """Empty all rows, without waiting for the device."""
        with self._lock, torch.no_grad(), untraced():
            self._settle()
            used = np.flatnonzero(self._calls)
            rows = np.zeros(len(used), dtype=ROW)
            rows["row"], rows["calls"], rows["order"] = used, np.take(self._calls, used), np.take(self._orders, used)
            places = np.searchsorted(used, self._part_rows)
            repeats = np.array(self._part_repeats, dtype=np.float64)
            taken = Taken(rows, partial(_finish, rows, places, repeats, self._real), self._join(used))
            self._clear()
        return taken

    def forget(self) -> None:
        with self._lock, torch.no_grad():
            self._settle()
            self._clear()

    def _check(self, row: int) -> None:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a slab of {len(self)} rows")

    def _read(self, new: Tensor, old: Tensor | None, row: int) -> None:
        """Take in ``new``, or ``new − old``, and count the call."""
        elements, repeats = drop_repeats(new)
        if elements.numel():
            self._fold(elements, None if old is None else drop_repeats(old)[0], row, repeats)
        self._count(row)

    def _count(self, row: int) -> None:
        """Count a call."""
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
            self._bins[row].add_(bins, alpha=repeats)

    def _settle(self) -> None:
        """Make parts of all that was read."""

    def _join(self, used: npt.NDArray[np.int64]) -> Tensor:
        """All parts, and the bins of these rows, as one tensor."""
        integer = EXPONENT[self._real][0]
        none = self._bins.new_empty(0, dtype=self._real)
        parts = torch.cat([part.view(-1) for part in self._parts] or [none])
        chosen = self._bins if len(used) == len(self._bins) else self._bins[self._to_device(torch.from_numpy(used))]
        return torch.cat([parts.view(integer).to(torch.int64), chosen.flatten()])

    def _to_device(self, numbers: Tensor) -> Tensor:
        """Copy host memory to the device without waiting for it."""
        return (numbers.pin_memory() if self.device.type == "cuda" else numbers).to(self.device, non_blocking=True)

    def _clear(self) -> None:
        self._calls = [0] * len(self)
        self._turns[0] = 0
        self._parts, self._part_rows, self._part_repeats = [], [], []
        self._bins.zero_()


def _finish(
    rows: npt.NDArray[np.void],
    places: npt.NDArray[np.int64],
    repeats: npt.NDArray[np.float64],
    real: torch.dtype,
    numbers: npt.NDArray[np.int64],
) -> tuple[bytes, bytes]:
    """Complete rows.

    Args:
        rows: ``row``, ``calls`` and ``order`` are known.
        places: of each part its row.
        repeats: how often the elements of each part count.
        real: the dtype of parts.
        numbers: the bits of all parts, and then the bins of each row.
    """
    size = len(places) * len(PART)
    integer, floating = (np.int32, np.float32) if real is torch.float32 else (np.int64, np.float64)
    parts = numbers[:size].astype(integer).view(floating).astype(np.float64).reshape(-1, len(PART))
    parts[:, :LOW] *= repeats[:, None]
    calls, order = rows["calls"].copy(), rows["order"].copy()
    for name, column in merge_rows(_columns(parts), places, len(rows)).items():
        rows[name] = column
    rows["calls"], rows["order"] = calls, order
    bins = numbers[size:].reshape(len(rows), -1) if len(rows) else np.zeros((0, 0), np.int64)
    return _pack(rows, bins[:, :BINS])


def _columns(parts: npt.NDArray[np.float64]) -> dict[str, npt.NDArray[Any]]:
    """Columns of rows from those of parts."""
    columns = dict(zip(PART, parts.T, strict=True))
    columns["count"] = columns.pop("n") + columns["nan"] + columns["pos_inf"] + columns["neg_inf"]
    return columns | dict.fromkeys(("calls", "order"), np.zeros(len(parts), np.int64))


def _pack(rows: npt.NDArray[np.void], bins: npt.NDArray[np.int64]) -> tuple[bytes, bytes]:
    """Set the stretch of each row, and make bytes of rows and stretches."""
    if not bins.size:
        return rows.tobytes(), b""
    filled = bins != 0
    first, last = filled.argmax(axis=1), BINS - 1 - filled[:, ::-1].argmax(axis=1)
    rows["first_bin"] = np.where(filled.any(axis=1), first, 0)
    rows["bins"] = np.where(filled.any(axis=1), last + 1 - first, 0)
    numbers = np.arange(BINS)
    inside = (numbers >= rows["first_bin"][:, None]) & (numbers < (rows["first_bin"] + rows["bins"])[:, None])
    return rows.tobytes(), bins[inside].tobytes()
