"""Memory to read into, used again: to be given new pages takes longer than to read them from a fast disk."""

from __future__ import annotations

import weakref
from collections import deque

from retrograd.policies.disk.pages import map_pages

_MOST_FREE = 4
"""So many are given back, at most, before one is taken again while a backward pass goes on."""


class Slabs:
    """Pieces of memory for several stretches each. One is free again when nothing refers to it any more.

    There is no lock: a piece is given back when the last tensor in it is deleted, whatever thread runs then and
    whatever it has locked.
    """

    def __init__(self) -> None:
        self._free: deque[memoryview] = deque(maxlen=_MOST_FREE)

    def take(self, nbytes: int) -> memoryview:
        """A piece of so many bytes, from any thread."""
        try:
            pages = self._free.pop()
        except IndexError:
            pages = map_pages(nbytes)
        if len(pages) != nbytes:
            pages = map_pages(nbytes)
        lease = pages[:]  # lives as long as a storage that is made of it
        weakref.finalize(lease, self._free.append, pages).atexit = False
        return lease

    def clear(self) -> None:
        """Hold none for later."""
        self._free.clear()
