"""Storage ranges as the threads see them that write them to a file and read them again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from retrograd.policies.disk.file import Extent, SpillFile
from retrograd.policies.policy import Packed


class FileRead:
    """Parts of the file that are read into one piece of memory, in the order in which they lie in the file.

    Args:
        extents: the parts.

    Attributes:
        memory: what was read; None before, and where it could not be read.
        nbytes: size of all parts.
        places: where each of ``extents`` lies in the memory.
    """

    __slots__ = ("__weakref__", "_is_over", "_runs", "memory", "nbytes", "places")

    def __init__(self, extents: Sequence[Extent]) -> None:
        self.memory: memoryview | None = None
        self.places = [0] * len(extents)
        self._is_over = threading.Lock()  # held until then
        self._is_over.acquire()
        self._runs: list[Extent] = []
        nbytes, end = 0, -1
        for index in sorted(range(len(extents)), key=extents.__getitem__):
            offset, length = extents[index]
            self.places[index] = nbytes
            nbytes += length
            run = self._runs.pop() if offset == end else Extent(offset, 0)
            self._runs.append(Extent(run.offset, run.length + length))
            end = offset + length
        self.nbytes = nbytes

    def carry_out(self, file: SpillFile, take: Callable[[int], memoryview]) -> None:
        """Read, into memory that is taken for so many bytes.

        Raises:
            OSError: it cannot be read.
        """
        try:
            memory = take(self.nbytes)
            place = 0
            for run in self._runs:
                file.read(run.offset, memory[place : place + run.length])
                place += run.length
            self.memory = memory
        finally:
            self._is_over.release()

    def wait(self) -> None:
        """Wait until it is over."""
        with self._is_over:
            pass


class FileRange(Packed):
    """A storage range in flight to the disk, there, or in flight back.

    Attributes:
        nbytes: its size.
        values: the memory, until it has been written; for good if it was not.
        ready: when it is computed, on a device.
        extent: where it is in the file.
        coming: what reads it with others before it is asked for, and at which byte of that it is.
        is_wanted: it is needed so soon that it need not be written any more.
    """

    __slots__ = ("coming", "extent", "is_wanted", "nbytes", "ready", "values")

    nbytes: int
    values: Tensor | None
    ready: torch.cuda.Event | None
    extent: Extent | None
    coming: tuple[FileRead, int] | None
    is_wanted: bool
