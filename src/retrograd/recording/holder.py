"""Kept tensors that wait until they are due, and how many bytes they are."""

from __future__ import annotations

from collections import deque

import torch

from retrograd.history.sink import KeptTensor


def count_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; of a sparse one, of what it stores."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    if tensor.layout is torch.sparse_coo:
        return count_bytes(tensor._values()) + count_bytes(tensor._indices())
    return tensor.values().nbytes


class Holder:
    """Holds tensors of the last steps.

    Args:
        depth: how many steps before the newest one.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._held: deque[tuple[int, int, list[KeptTensor]]] = deque()

    @property
    def oldest(self) -> int | None:
        """The oldest step of which something is held."""
        return self._held[0][0] if self._held else None

    def add(self, step: int, tensors: list[KeptTensor]) -> int:
        """Hold what one micro-batch gave; returns the bytes of what has become too old for it."""
        self._held.append((step, sum(count_bytes(kept.tensor) for kept in tensors), tensors))
        freed = 0
        while self._held[0][0] < step - self._depth:
            freed += self._held.popleft()[1]
        return freed

    def drop_oldest(self) -> tuple[int, int]:
        """Let the oldest micro-batch go; returns its bytes, and how many tensors it were."""
        _, size, gone = self._held.popleft()
        return size, len(gone)

    def release(self) -> list[KeptTensor]:
        """All that is held, oldest first; it is held no longer."""
        released = [kept for _, _, tensors in self._held for kept in tensors]
        self._held.clear()
        return released
