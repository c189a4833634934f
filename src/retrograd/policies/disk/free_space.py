"""Which parts of a file are free."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple


class Extent(NamedTuple):
    """A part of the file, in bytes."""

    offset: int
    length: int


class FreeSpace:
    """Which parts are free; the file grows where none is large enough."""

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int]] = []  # offset and length, sorted, never two side by side

    def take(self, length: int) -> Extent:
        """The smallest part that is long enough, or one at the end."""
        fitting = [(size, offset) for offset, size in self._free if size >= length]
        if not fitting:
            offset = self.end
            self.end += length
            return Extent(offset, length)
        size, offset = min(fitting)
        at = bisect_left(self._free, (offset, size))
        self._free[at : at + 1] = [(offset + length, size - length)] if size > length else []
        return Extent(offset, length)

    def give(self, extent: Extent) -> None:
        """A part is free again. It is joined with its neighbours, and what is free at the end is forgotten."""
        offset, length = extent.offset, extent.length
        at = bisect_left(self._free, (offset, 0))
        if at < len(self._free) and self._free[at][0] == offset + length:
            length += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset:
            offset, before = self._free.pop(at - 1)
            length += before
        if offset + length == self.end:
            self.end = offset
        else:
            insort(self._free, (offset, length))
