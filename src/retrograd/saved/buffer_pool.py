"""Host memory for copies, used again from step to step: asking for pinned memory costs milliseconds."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

from torch import Tensor

_UNIT = 2 << 20
"""Buffers are multiples of this, in bytes: not of a power of two, which takes a third more."""
_WASTE = 1.25
"""A free buffer may be so many times as large as what is asked for."""


class BufferPool:
    """Buffers that were given back are handed out again, the smallest that fits first.

    Args:
        allocate: makes one of so many bytes.
        limit: how many bytes there may be; None for no limit.

    Attributes:
        nbytes: of all buffers, whether they are in use or free.
    """

    def __init__(self, allocate: Callable[[int], Tensor], limit: int | None = None) -> None:
        self.nbytes = 0
        self._allocate = allocate
        self._limit = limit
        self._free: list[tuple[int, int, Tensor]] = []  # size, number, buffer; sorted by the first two
        self._returned: deque[Tensor] = deque()
        self._number = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Tensor | None:
        """A buffer of at least so many bytes; None where the limit leaves no room for it."""
        with self._lock:
            self._collect()
            at = bisect_left(self._free, (nbytes, 0))
            if at < len(self._free) and self._free[at][0] <= max(_WASTE * nbytes, _UNIT):
                return self._free.pop(at)[2]
            size = -(-nbytes // _UNIT) * _UNIT
            while self._limit is not None and self.nbytes + size > self._limit and self._free:
                self.nbytes -= self._free.pop()[0]
            if self._limit is not None and self.nbytes + size > self._limit:
                return None
            self.nbytes += size
            return self._allocate(size)

    def give(self, buffer: Tensor) -> None:
        """A buffer is free again. Takes no lock: it is called when objects are deleted, whatever runs then."""
        self._returned.append(buffer)

    def clear(self) -> None:
        """Forget the free ones."""
        with self._lock:
            self._collect()
            self.nbytes -= sum(size for size, _, _ in self._free)
            self._free.clear()

    def _collect(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._number += 1
            insort(self._free, (buffer.nbytes, self._number, buffer))
