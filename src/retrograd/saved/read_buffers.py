"""Memory to read into, used again: the kernel needs longer to hand out new pages than to read them from a fast disk."""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

BLOCK = 4096
"""Direct I/O moves whole blocks, from and to addresses that are multiples of one."""
_LARGE_PAGE = 2 << 20


def aligned(length: int) -> Tensor:
    """So many bytes of memory that begin at a multiple of a block."""
    raw = torch.empty(length + BLOCK, dtype=torch.uint8)
    start = -raw.data_ptr() % BLOCK
    return raw[start : start + length]


def large_pages(nbytes: int) -> Any:
    """So many bytes, as an array, in large pages where the kernel has some.

    The disk is given a piece for each page: with fewer pieces there are fewer requests and interrupts.
    """
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


class ReadBuffers:
    """Stretches of memory that begin at a block. One is free again when the last tensor in it is deleted.

    Attributes:
        limit: how many bytes are held for later, at most.
    """

    def __init__(self) -> None:
        self.limit = 0
        self._free: dict[int, list[Tensor]] = {}
        self._free_bytes = 0
        self._returned: deque[Tensor] = deque()  # filled when tensors are deleted, whatever runs then: no lock

    def take(self, nbytes: int) -> Tensor:
        """So many bytes; only ever called by one thread at a time."""
        while self._returned:
            self._keep(self._returned.popleft())
        free = self._free.get(nbytes)
        memory = free.pop() if free else None
        if memory is None:
            memory = aligned(nbytes)
        else:
            self._free_bytes -= nbytes
        lease = memory.numpy()  # lives as long as a storage that is made of it
        weakref.finalize(lease, self._returned.append, memory).atexit = False
        return torch.from_numpy(lease)

    def _keep(self, memory: Tensor) -> None:
        if self._free_bytes + len(memory) <= self.limit:
            self._free_bytes += len(memory)
            self._free.setdefault(len(memory), []).append(memory)
