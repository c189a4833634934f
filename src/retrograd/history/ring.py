"""The last tensors of each site, by reference, within a budget of bytes."""

from __future__ import annotations

import threading
from collections import deque

from retrograd.history.sink import KeptTensor


class Ring:
    """Keeps the last tensors of each site.

    Args:
        last: how many of each site; None for as many as the budget allows.
        budget: bytes of all tensors together. It is never passed: the oldest make room, and a tensor that is
            larger than the whole budget is not kept.
    """

    def __init__(self, last: int | None = None, budget: int = 1 << 30) -> None:
        self.last = last
        self.budget = budget
        self.bytes = 0
        self.dropped = 0
        self._held: dict[int, KeptTensor] = {}  # in order of arrival
        self._of_site: dict[str, deque[int]] = {}
        self._next = 0
        self._lock = threading.Lock()

    def add(self, kept: KeptTensor) -> int:
        """Keep a tensor; returns how many were dropped for want of room."""
        with self._lock:
            size = count_bytes(kept)
            site = self._of_site.setdefault(kept.site, deque())
            if self.last is not None and len(site) >= self.last:
                self._remove(site[0])
            dropped = 0
            while self._held and self.bytes + size > self.budget:
                self._remove(next(iter(self._held)))
                dropped += 1
            if size > self.budget:
                dropped += 1
            else:
                self._held[self._next] = kept
                site.append(self._next)
                self._next += 1
                self.bytes += size
            self.dropped += dropped
            return dropped

    def of_site(self, site: str) -> list[KeptTensor]:
        """What is held of a site, oldest first."""
        with self._lock:
            return [self._held[number] for number in self._of_site.get(site, ())]

    def _remove(self, number: int) -> None:
        kept = self._held.pop(number)
        self._of_site[kept.site].popleft()
        self.bytes -= count_bytes(kept)


def count_bytes(kept: KeptTensor) -> int:
    """Bytes of a tensor's elements; of a sparse one, of those that it has."""
    tensor = kept.tensor._values() if kept.tensor.is_sparse else kept.tensor
    return int(tensor.numel()) * tensor.element_size()
