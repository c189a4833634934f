"""How many bytes are held now, counted from wherever they are taken or freed."""

from __future__ import annotations

from collections import deque


class Ledger:
    """A sum of changes.

    Adding takes no lock: it is done when objects are deleted, whatever runs then. Only :meth:`total` must be called by
    one thread at a time.
    """

    def __init__(self) -> None:
        self._changes: deque[int] = deque()
        self._total = 0

    def add(self, nbytes: int) -> None:
        """So many bytes more, or less."""
        self._changes.append(nbytes)

    def total(self) -> int:
        """Bytes held."""
        while self._changes:
            self._total += self._changes.popleft()
        return self._total
