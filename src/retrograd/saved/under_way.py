"""Copies that are under way hold their memory: how many may."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class UnderWay(Generic[T]):
    """What is on its way out of memory, the oldest first."""

    def __init__(self) -> None:
        self._items: deque[tuple[T, int]] = deque()
        self._nbytes = 0

    def add(self, item: T, nbytes: int, window: int) -> list[T]:
        """One more is under way; returns those that come out, since they are not among the last ``window`` bytes.

        The one that is added does not come out, however large it is: nothing would be computed beside its copy.
        """
        self._items.append((item, nbytes))
        self._nbytes += nbytes
        gone = []
        while self._nbytes > max(window, nbytes):
            gone.append(self._take())
        return gone

    def drain(self) -> list[T]:
        """All come out."""
        return [self._take() for _ in range(len(self._items))]

    def _take(self) -> T:
        item, nbytes = self._items.popleft()
        self._nbytes -= nbytes
        return item
