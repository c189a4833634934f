"""Keep saved tensors in fewer bytes, bit by bit the same."""

from __future__ import annotations

import torch
from torch import Tensor

from retrograd.memory.policies.policy import Packed, Policy, Saved

_SAMPLE = 4096
_MOST_LEFT = 0.9
"""Memory is only packed where less than this share of it would be left."""

_INTEGERS = frozenset({torch.int16, torch.int32, torch.int64})
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Lossless(Policy):
    """Keep what is saved in fewer bytes where it has structure, and leave it as it is where it has none.

    Booleans take a bit each; integers as few bytes as the largest needs (indices of a max-pool); of a tensor with many
    zeros (the output of a ReLU) only a bit for each value and those that are not zero are kept. A sample of the values
    decides whether it pays. Booleans apart, the size depends on the values, so that tensors on other devices than the
    CPU stay: asking them would make the program wait.

    Args:
        min_bytes: smaller storage ranges stay.
    """

    def __init__(self, *, min_bytes: int = Policy.min_bytes) -> None:
        self.min_bytes = min_bytes

    def pack(self, saved: Saved) -> Packed | None:
        """Keep less of it, if that pays."""
        values = saved.values
        if values.dtype is torch.bool:
            return _Bits(values)
        if values.device.type != "cpu":
            return None
        words = values.view(_WORDS[values.itemsize]) if values.itemsize in _WORDS else None
        if words is None:
            return None
        sample = words[:: max(1, len(words) // _SAMPLE)]
        dense = float(sample.count_nonzero()) / len(sample)
        if dense + 1 / (8 * values.itemsize) < _MOST_LEFT:
            return _Sparse(words, values.dtype)
        return _narrow(values) if values.dtype in _INTEGERS else None


def pack_bits(flags: Tensor) -> Tensor:
    """Eight booleans a byte, the first of them the lowest bit."""
    rest = -flags.numel() % 8
    rows = torch.nn.functional.pad(flags.view(torch.uint8), (0, rest)).view(-1, 8)
    packed = rows[:, 0].clone()
    for bit in range(1, 8):
        packed |= rows[:, bit] << bit
    return packed


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """The booleans again."""
    rows = torch.empty((packed.numel(), 8), dtype=torch.bool, device=packed.device)
    for bit in range(8):
        rows[:, bit] = (packed >> bit) & 1
    return rows.view(-1)[:numel]


class _Bits(Packed):
    """Booleans."""

    __slots__ = ("_bits", "_numel")

    def __init__(self, values: Tensor) -> None:
        self._bits = pack_bits(values)
        self._numel = values.numel()
        super().__init__(self._bits.nbytes)

    def restore(self) -> Tensor:
        return unpack_bits(self._bits, self._numel)


class _Sparse(Packed):
    """Values of which many are zero in all bits: −0.0 is not."""

    __slots__ = ("_bits", "_dtype", "_numel", "_words")

    def __init__(self, words: Tensor, dtype: torch.dtype) -> None:
        is_set = words != 0
        self._bits = pack_bits(is_set)
        self._words = words[is_set]
        self._dtype = dtype
        self._numel = words.numel()
        super().__init__(self._bits.nbytes + self._words.nbytes)

    def restore(self) -> Tensor:
        words = torch.zeros(self._numel, dtype=self._words.dtype)
        words[unpack_bits(self._bits, self._numel)] = self._words
        return words.view(self._dtype)


class _Narrow(Packed):
    """Integers in fewer bytes."""

    __slots__ = ("_dtype", "_values")

    def __init__(self, values: Tensor, narrow: torch.dtype) -> None:
        self._values = values.to(narrow)
        self._dtype = values.dtype
        super().__init__(self._values.nbytes)

    def restore(self) -> Tensor:
        return self._values.to(self._dtype)


def _narrow(values: Tensor) -> Packed | None:
    """Integers in as few bytes as they need; None if that is as many as they have."""
    low, high = (int(extreme) for extreme in torch.aminmax(values))
    for narrow in (torch.uint8, torch.int8, torch.int16, torch.int32):
        limits = torch.iinfo(narrow)
        if narrow.itemsize < values.itemsize and limits.min <= low and high <= limits.max:
            return _Narrow(values, narrow)
    return None
