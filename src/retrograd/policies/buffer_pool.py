"""Host memory for copies, used again from step to step: asking for pinned memory costs milliseconds."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

from torch import Tensor

from retrograd.amounts import show_bytes
from retrograd.notices import warn

_UNIT = 64 << 10
"""Buffers begin at multiples of this, in bytes."""
_LEAST = 64 << 20
_MOST = 1 << 30
"""Bytes of the smallest and of the largest piece that is asked for, unless a buffer is larger."""
_SHARE = 8
"""A new piece is no larger than such a part of all that there are, or the smallest: it may be the last."""


class BufferPool:
    """Buffers are cut out of large pieces of memory, where it is tightest, and put together again when given back.

    Torch rounds pinned memory up to a power of two (``CachingHostAllocatorImpl::allocate``), which is a third more for
    the tensors of a ResNet; so pieces are powers of two, and buffers are not.

    Args:
        allocate: makes a piece of so many bytes; a RuntimeError says that there is no memory for it. When there is not
            even for as much as is asked for, what there is then is the limit from then on, with one warning.
        limit: how many bytes there may be; None for no limit.

    Attributes:
        nbytes: of all pieces, whether they are in use or free.
    """

    def __init__(self, allocate: Callable[[int], Tensor], limit: int | None = None) -> None:
        self.nbytes = 0
        self._allocate = allocate
        self._limit = limit
        self._pieces: dict[int, Tensor] = {}  # by address
        self._free: list[tuple[int, int, int]] = []  # size, piece, start; sorted
        self._starts: dict[tuple[int, int], int] = {}  # piece and start of what is free → its end
        self._ends: dict[tuple[int, int], int] = {}  # piece and end of what is free → its start
        self._returned: deque[Tensor] = deque()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Tensor | None:
        """A buffer of so many bytes; None where the limit, or the machine, leaves no room for it."""
        size = _round_up(nbytes)
        with self._lock:
            self._collect()
            at = bisect_left(self._free, (size, 0, 0))
            if at == len(self._free):
                if not self._grow(size):
                    return None
                at = bisect_left(self._free, (size, 0, 0))
            length, piece, start = self._free[at]
            self._use(start, start + length, piece)
            if length > size:
                self._release(start + size, start + length, piece)
            return self._pieces[piece][start : start + nbytes]

    def give(self, buffer: Tensor) -> None:
        """A buffer is free again. Takes no lock: it is called when objects are deleted, whatever runs then."""
        self._returned.append(buffer)

    def clear(self) -> None:
        """Forget the pieces of which nothing is in use."""
        with self._lock:
            self._collect()
            for length, piece, start in list(self._free):
                if length == self._pieces[piece].nbytes:
                    self._use(start, start + length, piece)
                    del self._pieces[piece]
                    self.nbytes -= length

    def _grow(self, size: int) -> bool:
        """One more piece with room for so many bytes, if the limit and the machine allow it."""
        wanted = max(_power_of_two(size), _LEAST, min(_power_of_two_within(self.nbytes // _SHARE), _MOST))
        if self._limit is not None:
            wanted = min(wanted, _power_of_two_within(self._limit - self.nbytes))
        failure = ""
        while wanted >= size:
            try:
                piece = self._allocate(wanted)
            except RuntimeError as error:
                failure = str(error).partition("\n")[0]  # the error itself would hold this frame
                wanted //= 2
            else:
                self._pieces[piece.data_ptr()] = piece
                self.nbytes += wanted
                self._release(0, wanted, piece.data_ptr())
                return True
        if failure:
            self._limit = self.nbytes
            self._warn(failure)
        return False

    def _warn(self, failure: str) -> None:
        warn(
            f"From now on what finds no room in {show_bytes(self.nbytes)} of the host's memory stays on the device:"
            f" no more of it can be pinned ({failure})."
        )

    def _collect(self) -> None:
        """Put what was given back together with what is free beside it."""
        while self._returned:
            buffer = self._returned.popleft()
            piece, start = buffer.untyped_storage().data_ptr(), int(buffer.storage_offset())
            end = start + _round_up(buffer.nbytes)
            before, after = self._ends.get((piece, start)), self._starts.get((piece, end))
            if before is not None:
                self._use(before, start, piece)
            if after is not None:
                self._use(end, after, piece)
            self._release(start if before is None else before, end if after is None else after, piece)

    def _release(self, start: int, end: int, piece: int) -> None:
        """These bytes of a piece are free, and none beside them."""
        insort(self._free, (end - start, piece, start))
        self._starts[piece, start] = end
        self._ends[piece, end] = start

    def _use(self, start: int, end: int, piece: int) -> None:
        """Take these bytes of a piece, which are free as a whole."""
        del self._free[bisect_left(self._free, (end - start, piece, start))]
        del self._starts[piece, start], self._ends[piece, end]


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _UNIT) * _UNIT


def _power_of_two(nbytes: int) -> int:
    """Round up to a power of two."""
    return 1 << (nbytes - 1).bit_length()


def _power_of_two_within(nbytes: int) -> int:
    """Round down to a power of two, at least 1."""
    return 1 << max(nbytes, 1).bit_length() - 1
