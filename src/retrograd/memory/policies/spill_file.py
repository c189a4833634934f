"""A file without a name, in which memory waits, and the memory to write from and to read into.

Space in the file that is free again is used again. Direct I/O moves whole blocks; large pages make fewer requests.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

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
    """Allocate so many bytes that begin at a block, of memory that the program has used before if there is some."""
    return _aligned(np.empty(nbytes + BLOCK, dtype=np.uint8), BLOCK, nbytes)


def map_pages(nbytes: int) -> memoryview:
    """Map so many bytes that begin at a block, of new memory; in large pages as far as they fill some.

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
"""So many are held for later. A backward pass takes a new one no more than once or twice: to have the system find and
clear large pages takes longer than to read them full."""


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


def mark_ready(values: Tensor) -> torch.cuda.Event | None:
    """Record an event after which values are what they are now; None where they are already."""
    if not values.is_cuda:
        return None
    is_ready = torch.cuda.Event()
    is_ready.record(torch.cuda.current_stream(values.device))
    return is_ready


def fetch(values: Tensor, is_ready: torch.cuda.Event | None) -> Tensor:
    """Copy values to memory of the CPU; this thread waits for the copy, and the computing stream does not."""
    if is_ready is None:
        return values
    with torch.cuda.stream(_copying_stream(values.device)):
        is_ready.wait()
        return values.cpu()


@cache
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device for copies: torch hands out its 32 in turn, also to those who should not wait."""
    return torch.cuda.Stream(device)


class Extent(NamedTuple):
    """A part of the file, in bytes."""

    offset: int
    length: int


class FreeSpace:
    """The free parts of a file, which grows where none is large enough."""

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
        """Record that a part is free again. It is joined with its neighbours; what is free at the end is forgotten."""
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


CHUNK = 4 << 20
"""So much is written at once: in pieces of a quarter of it the disk takes half as much processor time again."""
_PREFIX = "retrograd-saved-"


class SpillFile:
    """A file of this process that vanishes with it, however it ends.

    Its name is gone as soon as it is open. Where that cannot be (Windows), the next one to open a file in the folder
    removes it. Pages do not stay in the page cache: they are written around it where the file system can
    (``O_DIRECT``), else dropped after they have been written.

    Args:
        folder: where.

    Raises:
        OSError: it cannot be made there.
    """

    def __init__(self, folder: Path) -> None:
        remove_leftovers(folder)
        self._descriptor, path = tempfile.mkstemp(prefix=_PREFIX, suffix=".bin", dir=folder)
        try:
            self._is_direct = self._go_direct(path)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # the kernel's own reading ahead stays
        finally:
            with suppress(OSError):  # Windows: an open file keeps its name
                Path(path).unlink()
        self._space = FreeSpace()
        self._lock = threading.Lock()
        self._returned: deque[Extent] = deque()
        self._local = threading.local()

    def take(self, nbytes: int) -> Extent:
        """Room for so many bytes."""
        with self._lock:
            while self._returned:
                self._space.give(self._returned.popleft())
            return self._space.take(whole_blocks(nbytes))

    def give(self, extent: Extent) -> None:
        """Record that a part is free again. Takes no lock: it is called when objects are deleted, at any moment."""
        self._returned.append(extent)

    @property
    def nbytes(self) -> int:
        """Length of the part of the file that is in use."""
        return self._space.end

    def write(self, parts: Iterable[Tensor], extent: Extent) -> None:
        """Write the memory of contiguous CPU tensors one after another, each from the beginning of a block.

        Raises:
            OSError: the disk is full or gone.
        """
        buffer = self._buffer()
        start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        offset, filled = extent.offset, 0
        for values in parts:
            source, left = values.data_ptr(), values.nbytes
            while left:
                count = min(left, CHUNK - filled)
                ctypes.memmove(start + filled, source, count)  # lets other threads run meanwhile
                source, left = source + count, left - count
                filled += whole_blocks(count)
                if filled == CHUNK:
                    self._write_all(buffer, offset)
                    offset, filled = offset + filled, 0
        self._write_all(buffer[:filled], offset)
        self._drop_pages(extent, written=True)

    def read(self, offset: int, memory: memoryview) -> None:
        """Read whole blocks into memory that begins at a block.

        Raises:
            OSError: it cannot be read.
        """
        extent = Extent(offset, len(memory))
        while memory:
            count = os.preadv(self._descriptor, [memory], offset)
            if not count:
                raise OSError(f"the file ends at byte {offset}")
            memory, offset = memory[count:], offset + count
        self._drop_pages(extent, written=False)

    def _go_direct(self, path: str) -> bool:
        """Open the file anew for direct I/O, if that can be."""
        if not hasattr(os, "O_DIRECT"):
            return False
        try:
            direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            return False
        os.close(self._descriptor)
        self._descriptor = direct
        return True

    def _buffer(self) -> memoryview:
        """Return the blocks that this thread copies into: direct I/O cannot read where tensors lie."""
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = map_pages(CHUNK)
        return buffer

    def _write_all(self, memory: memoryview, offset: int) -> None:
        while memory:
            count = os.pwrite(self._descriptor, memory, offset) // BLOCK * BLOCK
            if not count:
                raise OSError(errno.ENOSPC, "only a part could be written")
            memory, offset = memory[count:], offset + count

    def _drop_pages(self, extent: Extent, *, written: bool) -> None:
        if self._is_direct or not hasattr(os, "posix_fadvise"):
            return
        if written:
            os.fdatasync(self._descriptor)  # a page that is not on the disk yet cannot be dropped
        os.posix_fadvise(self._descriptor, extent.offset, extent.length, os.POSIX_FADV_DONTNEED)

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):  # it could not be opened
            os.close(self._descriptor)


_open: WeakValueDictionary[tuple[Path, int], SpillFile] = WeakValueDictionary()
_opening = threading.Lock()


def open_spill_file(folder: Path) -> SpillFile:
    """The file of this process in a folder; a process that was forked gets one of its own.

    Raises:
        OSError: the file cannot be made.
    """
    key = (folder, os.getpid())
    with _opening:
        file = _open.get(key)
        if file is None:
            file = _open[key] = SpillFile(folder)
        return file


def _forget_parents() -> None:
    """Begin anew in a process that was forked, where another thread may have held the lock."""
    global _opening
    _opening = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents)


def remove_leftovers(folder: Path) -> None:
    """Remove files that a process which was killed has left, where an open file keeps its name. One in use stays."""
    for path in folder.glob(f"{_PREFIX}*.bin"):
        with suppress(OSError):
            path.unlink()


def default_folder() -> Path:
    """The folder for large temporary files: ``TMPDIR`` if set, else ``/var/tmp``, since ``/tmp`` is often memory."""
    lasting = Path("/var/tmp")
    chosen = os.environ.get("TMPDIR")
    if chosen is None and lasting.is_dir() and os.access(lasting, os.W_OK):
        return lasting
    return Path(tempfile.gettempdir())
