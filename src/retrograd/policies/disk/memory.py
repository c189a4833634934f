"""Memory to write from and to read into: whole blocks, large pages, and the host's side of a copy from a device."""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from contextlib import suppress
from functools import cache

import numpy as np
import torch
from torch import Tensor

BLOCK = 4096
"""Direct I/O moves whole blocks, from and to addresses that are multiples of one."""
_LARGE_PAGE = 2 << 20


def whole_blocks(nbytes: int) -> int:
    """Bytes of the blocks that hold so many."""
    return -(-nbytes // BLOCK) * BLOCK


def allocate(nbytes: int) -> memoryview:
    """So many bytes that begin at a block, of memory that the program has used before if there is some."""
    return _aligned(np.empty(nbytes + BLOCK, dtype=np.uint8), BLOCK, nbytes)


def map_pages(nbytes: int) -> memoryview:
    """So many bytes that begin at a block, of new memory; in large pages as far as they fill some.

    The disk is given a piece for each page: with fewer pieces there are fewer requests and interrupts.
    """
    large = nbytes // _LARGE_PAGE * _LARGE_PAGE
    if not hasattr(mmap, "MADV_HUGEPAGE") or not large:
        return _aligned(np.frombuffer(_map(nbytes), dtype=np.uint8), BLOCK, nbytes)
    region = _map(nbytes + _LARGE_PAGE)  # nothing is there before it is used
    pages = np.frombuffer(region, dtype=np.uint8)
    with suppress(OSError):  # a kernel without them
        region.madvise(mmap.MADV_HUGEPAGE, -pages.ctypes.data % _LARGE_PAGE, large)  # a part of one would be a whole
    return _aligned(pages, _LARGE_PAGE, nbytes)


def _map(nbytes: int) -> mmap.mmap:
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, nbytes)


def _aligned(memory: np.ndarray[tuple[int], np.dtype[np.uint8]], alignment: int, nbytes: int) -> memoryview:
    start = -memory.ctypes.data % alignment
    return memoryview(memory)[start : start + nbytes]  # type: ignore[arg-type]  # an array is a buffer


_MOST_FREE = 4
"""So many are given back, at most, before one is taken again while a backward pass goes on."""


class ReadBuffers:
    """Pieces of memory for several ranges each. One is free again when nothing refers to it any more.

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


def mark_ready(values: Tensor) -> torch.cuda.Event | None:
    """When values are what they are now, however far their device has come; None where that is at once."""
    if not values.is_cuda:
        return None
    is_ready = torch.cuda.Event()
    is_ready.record(torch.cuda.current_stream(values.device))
    return is_ready


def fetch(values: Tensor, is_ready: torch.cuda.Event | None) -> Tensor:
    """The values in memory of the CPU; this thread waits for the copy, and the computing stream does not."""
    if is_ready is None:
        return values
    with torch.cuda.stream(_copying_stream(values.device)):
        is_ready.wait()
        return values.cpu()


@cache
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device: torch has 32 of them, which it hands out in turn, also to those who should not wait."""
    return torch.cuda.Stream(device)
