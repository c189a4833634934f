"""A slab: the rows that tensors are read into, one per place in the model."""

from __future__ import annotations

import os
from array import array
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from retrograd.core.notices import Notices
from retrograd.core.randomness import random_kept
from retrograd.core.statistics.readable import UnreadableTensorError, make_readable
from retrograd.core.statistics.row import ROW
from retrograd.core.statistics.torch_slab import Taken, TorchSlab, make_turns

try:
    from retrograd.core.statistics import _kernel

    NativeSlab, copy_into, sum_words = _kernel.Slab, _kernel.copy_into, _kernel.sum_bits
    add_squares = _kernel.sum_squares
except (ImportError, AttributeError):  # installed without a compiler, or not built anew since
    NativeSlab = None  # type: ignore[assignment]

__all__ = [
    "NativeSlab", "Slab", "Taken", "TorchSlab", "UnreadableTensorError", "copy_elements", "make_slab", "make_turns",
    "observe_updates", "sum_bits", "sum_squares", "take",
]  # fmt: skip

_notices = Notices()


class Slab(Protocol):
    """Rows of statistics, filled during a step and drained at its end.

    Row numbers are stable. One slab may be called from several threads.
    """

    def __len__(self) -> int:
        """Number of rows."""

    def grow(self, n: int, /) -> None:
        """Ensure that there are at least ``n`` rows."""

    def observe(self, tensor: Tensor, row: int, /) -> bool:
        """Merge the elements of a tensor into a row, without a host synchronisation.

        Returns:
            ``tensor.requires_grad``, which was asked anyway.

        Raises:
            UnreadableTensorError: for a tensor without elements to read; says why.
            IndexError: for a row that does not exist.
        """

    def observe_update(self, new: Tensor, old: Any, row: int, /) -> None:
        """Merge the elements of ``new − old`` into a row, and Σ old² into its ``reference``.

        ``old`` is a tensor, or what :func:`copy_elements` has made of one on this device.

        Raises:
            UnreadableTensorError: as :meth:`observe`.
            ValueError: for tensors of different size or dtype.
        """

    def drain(self) -> tuple[bytes, bytes]:
        """Empty all rows.

        Returns:
            The bytes of an array of :data:`~retrograd.core.statistics.row.ROW`, those rows that were observed, in row
            order; and the bytes of an int64 array, their stretches of the histogram one after the other. Rows are
            counted anew from then on, in the order in which they are reached.
        """

    def forget(self) -> None:
        """Empty all rows, and tell nothing."""


def take(slab: Slab) -> Taken:
    """Empty all rows of a slab, without waiting for its device."""
    if isinstance(slab, TorchSlab):
        return slab.take()
    drained = slab.drain()
    return Taken(np.frombuffer(drained[0], ROW), lambda: drained)


def copy_elements(tensors: list[Tensor | None], rooms: list[bytearray | None]) -> list[bytearray | None]:
    """Copy the elements of tensors on the CPU for their slab's ``observe_update``.

    Args:
        tensors: the tensors; None for one that is not to be copied.
        rooms: copies of earlier, at the places of the tensors, that are not read any more. Their memory is used again
            where it has the size.

    Returns:
        None for one that has gaps between its elements in memory, or that the kernel does not read.
    """
    return [None] * len(tensors) if NativeSlab is None else copy_into(tensors, rooms)


def sum_bits(tensors: list[Tensor]) -> list[int | None]:
    """Of each tensor the sum of the eight-byte words that its bits are; None for one that the kernel does not read."""
    return [None] * len(tensors) if NativeSlab is None else sum_words(tensors)


def sum_squares(tensors: list[Tensor]) -> float | None:
    """The sum of the squares of all elements of tensors, in float64; None where the kernel cannot read one."""
    return None if NativeSlab is None else add_squares(tensors)


def observe_updates(
    slab: Slab | None, new: list[Tensor], old: list[Any], rows: list[int], begin: int, bits: bytearray
) -> int:
    """Do what ``slab.observe_update`` does with each of these, from place ``begin`` on, in one call of the kernel.

    Args:
        slab: the slab.
        new: the tensors after the update.
        old: copies from before it.
        rows: where they go.
        begin: the first place.
        bits: gets the sums of the bits of ``old`` and of ``new`` at its place, 16 bytes each.

    Returns:
        The place of the first one that is to be observed by itself: it has no plain elements, or ``old`` is not what
        :func:`copy_elements` has made of it. Their number where there is none.
    """
    if NativeSlab is None or not isinstance(slab, NativeSlab):
        return begin
    return slab.observe_updates(new, old, rows, begin, bits)


def make_slab(device: str | torch.device = "cpu", histogram: bool = True, turns: array[int] | None = None) -> Slab:
    """The fastest slab there is for tensors on a device.

    Args:
        device: where the tensors live that it will read.
        histogram: count binary exponents too.
        turns: what counts the rows that are reached; slabs that share it, and are drained together, are one order.

    Raises:
        UnreadableTensorError: for the meta device, whose tensors have no elements.
    """
    device = torch.device(device)
    if device.type == "meta":
        raise UnreadableTensorError("a meta tensor has no elements")
    turns = make_turns() if turns is None else turns
    if device.type == "cpu" and NativeSlab is not None:
        return NativeSlab(histogram, partial(make_readable, device=device), turns)
    if device.type == "cuda" and find_spec("triton") is not None:
        with random_kept():
            from retrograd.core.statistics.cuda_slab import CudaSlab

        return CudaSlab(device, histogram, turns=turns)
    if device.type == "cpu" and os.environ.get("RANK", "0") == "0":  # of many ranks one says it
        _notices.warn_once(
            "kernel",
            "Statistics are computed by torch's operations, in about six times the time: retrograd's compiled kernel "
            "is missing here. `retrograd doctor` says why.",
        )
    return TorchSlab(device, histogram, turns)
