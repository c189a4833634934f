"""Memory to read into: in large pages, and used again as long as there is a pass.

The kernel needs longer to hand out new pages than to read them from a fast disk. And it gives the disk a piece for each
page: where pages are large there are fewer pieces, fewer requests, and fewer interrupts when they are done.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrograd.saved.free_space import Extent, FreeSpace

BLOCK = 4096
"""Direct I/O moves whole blocks, from and to addresses that are multiples of one."""
_LARGE_PAGE = 2 << 20


def make_memory(nbytes: int) -> Any:
    """So many bytes, as an array, that begin at a multiple of a large page; in large pages if the kernel has some."""
    padded = nbytes + _LARGE_PAGE  # nothing is there before it is used
    if hasattr(mmap, "MAP_PRIVATE"):
        region = mmap.mmap(-1, padded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                region.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(region, dtype=np.uint8)
    else:
        memory = np.empty(padded, dtype=np.uint8)
    start = -memory.ctypes.data % _LARGE_PAGE
    return memory[start : start + nbytes]


def aligned(nbytes: int) -> Tensor:
    """So many bytes that begin at a block."""
    raw = torch.empty(nbytes + BLOCK, dtype=torch.uint8)
    start = -raw.data_ptr() % BLOCK
    return raw[start : start + nbytes]


class ReadBuffers:
    """Parts of one stretch of memory, which is there as long as one of them is in use.

    Attributes:
        nbytes: of the memory that is made next. What finds no room in it is given memory of its own.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._memory: weakref.ref[Any] | None = None
        self._space = FreeSpace()
        self._returned: deque[Extent] = deque()  # filled when tensors are deleted, whatever runs then: no lock

    def take(self, nbytes: int) -> Tensor:
        """So many bytes that begin at a block; only ever called by one thread at a time."""
        memory = None if self._memory is None else self._memory()
        if memory is None and nbytes <= self.nbytes:
            memory = make_memory(self.nbytes)
            self._memory, self._space, self._returned = weakref.ref(memory), FreeSpace(), deque()
        while self._returned:
            self._space.give(self._returned.popleft())
        room = self._space.take(nbytes)
        if memory is None or room.offset + nbytes > len(memory):
            self._space.give(room)
            return aligned(nbytes)
        part = memory[room.offset : room.offset + nbytes]  # lives as long as a storage that is made of it
        weakref.finalize(part, _give_back, self._returned, room, memory).atexit = False
        return torch.from_numpy(part)


def _give_back(returned: deque[Extent], room: Extent, memory: Any) -> None:
    """A part is free again; what holds this call's arguments until now holds the memory."""
    returned.append(room)
