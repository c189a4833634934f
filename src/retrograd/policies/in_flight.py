"""Copies in flight, which hold their memory: how many may."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class InFlight(Generic[T]):
    """Copies out of memory that are in flight, the oldest first.

    All that it knows is in one queue, so that an interrupt between two lines leaves nothing that does not fit.
    """

    def __init__(self) -> None:
        self._items: deque[tuple[T, int, int]] = deque()  # each with the bytes before it and up to its end

    def add(self, item: T, nbytes: int, window: int) -> list[T]:
        """Add one; returns those that come out, since they are not among the last ``window`` bytes.

        The one that is added does not come out, however large it is: nothing would be computed beside its copy.
        """
        start = self._items[-1][2] if self._items else 0
        end = start + nbytes
        self._items.append((item, start, end))
        gone = []
        while end - self._items[0][1] > max(window, nbytes):
            gone.append(self._items.popleft()[0])
        return gone

    def drain(self) -> list[T]:
        """Take all out."""
        return [self._items.popleft()[0] for _ in range(len(self._items))]
