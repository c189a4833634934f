"""Memory that direct I/O can read into and write from: whole blocks, in large pages where there are some."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

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
