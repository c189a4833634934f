"""Storage ranges on their way to a file and back: the thread that writes them, and the one that reads them ahead."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import accumulate
from queue import SimpleQueue

import torch
from torch import Tensor

from retrograd.memory.policies.policy import Packed
from retrograd.memory.policies.spill_file import CHUNK, Extent, ReadBuffers, SpillFile, allocate, fetch, whole_blocks


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


class SpillWriter:
    """Writes what it is given, in batches: to wake a thread for each range costs more than to write it.

    Args:
        file: where to.
        max_waiting: how many bytes may wait to be written.

    Attributes:
        failure: the error after which it writes no more.
    """

    def __init__(self, file: SpillFile, max_waiting: int) -> None:
        self.failure: Exception | None = None
        self._file = file
        self._max_waiting = max_waiting
        self._batch_bytes = min(CHUNK, max_waiting // 2)  # one is filled while the other one is written
        self._added = 0  # bytes, ever; so is the next
        self._done = 0
        self._batch: list[weakref.ref[FileRange]] = []
        self._batched = 0  # bytes of the batch
        self._adding = threading.Lock()
        self._has_room = threading.Condition()
        self._batches: SimpleQueue[tuple[list[weakref.ref[FileRange]], int] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="retrograd-disk-writer", daemon=True)
        self._thread.start()

    def add(self, file_range: FileRange) -> None:
        """Take over a storage range; waits while too much is to be written."""
        nbytes = file_range.nbytes
        with self._adding:
            self._batch.append(weakref.ref(file_range))
            self._batched += nbytes
            self._added += nbytes  # last: after an interrupt nobody waits for what will not be sent
            if self._batched >= self._batch_bytes:
                self._send_batch()
        if self._added - self._done > self._max_waiting:
            self._wait_for(max(self._max_waiting, nbytes))

    def flush(self) -> None:
        """Wait until all that was taken over is written, or is in memory for good."""
        self._wait_for(0)

    def stop(self) -> None:
        """End the thread, when what waits is written."""
        with self._adding:
            self._send_batch()
            self._batches.put(None)
        self._thread.join()

    def _wait_for(self, waiting: int) -> None:
        """Wait until no more than so many bytes of what was taken over so far are still to be written.

        What other threads add meanwhile does not count: it may never be sent.
        """
        with self._adding:
            self._send_batch()
            due = self._added - waiting
        with self._has_room:
            self._has_room.wait_for(lambda: self._done >= due or self.failure is not None)

    def _send_batch(self) -> None:
        if self._batch:
            self._batches.put((self._batch, self._batched))
            self._batch, self._batched = [], 0

    def _write_all(self) -> None:
        while (batch := self._batches.get()) is not None:
            references, nbytes = batch
            try:
                if self.failure is None:
                    self._write([reference() for reference in references])
            except Exception as error:  # whoever waits for this thread must be told, whatever it is
                self.failure = error.with_traceback(None)  # its frames hold what was to be written
            with self._has_room:
                self._done += nbytes
                self._has_room.notify_all()

    def _write(self, batch: Sequence[FileRange | None]) -> None:
        """Move memory to the disk, one range after the other; what is needed meanwhile stays."""
        here = [one for one in batch if one is not None and not one.is_wanted]
        waiting = [(one, one.values) for one in here if one.values is not None]
        if not waiting:
            return
        lengths = [whole_blocks(file_range.nbytes) for file_range, _ in waiting]
        room = self._file.take(sum(lengths))
        try:
            self._file.write((fetch(values, file_range.ready) for file_range, values in waiting), room)
        except Exception:
            self._file.give(room)
            raise
        offsets = accumulate(lengths, initial=room.offset)
        for (file_range, _), offset, length in zip(waiting, offsets, lengths, strict=False):  # the last is the end
            file_range.extent = Extent(offset, length)
            if not file_range.is_wanted:
                file_range.values = None


class SpillReader:
    """Reads what it is asked to, several ranges at once.

    Whoever asks lays down what is read to where, so that this thread does next to nothing between two calls of the
    kernel: what it does in Python, it does while the thread that computes cannot.

    Args:
        file: where from.
    """

    def __init__(self, file: SpillFile) -> None:
        self._file = file
        self._slabs = ReadBuffers()
        self._slab_bytes = 0
        self._asking = threading.Lock()
        self._is_running = True
        self._readings: SimpleQueue[weakref.ref[FileRead] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._read_all, name="retrograd-disk-reader", daemon=True)
        self._thread.start()

    def begin(self, file_ranges: Iterable[FileRange], together: int) -> None:
        """Have read what is away and not in flight yet. What is still here stays.

        Args:
            file_ranges: in the order in which they are needed.
            together: so many bytes share a piece of memory, which is free again when all of them are used.
        """
        with self._asking:
            if not self._is_running:
                return
            self._slab_bytes = together
            group: list[tuple[FileRange, Extent]] = []
            nbytes = 0
            for file_range in file_ranges:
                file_range.is_wanted = True  # so that it is not written in the last moment
                extent = file_range.extent
                if extent is None or file_range.values is not None or file_range.coming is not None:
                    continue
                if group and nbytes + extent.length > together:
                    self._begin(group)
                    group, nbytes = [], 0
                group.append((file_range, extent))
                nbytes += extent.length
            if group:
                self._begin(group)

    def stop(self) -> None:
        """End the thread, when what was asked for is read."""
        with self._asking:
            self._is_running = False
            self._readings.put(None)
        self._thread.join()

    def _begin(self, group: list[tuple[FileRange, Extent]]) -> None:
        reading = FileRead([extent for _, extent in group])
        self._readings.put(weakref.ref(reading))  # first: after an interrupt nobody waits for what never comes
        for (file_range, _), place in zip(group, reading.places, strict=True):
            file_range.coming = reading, place

    def _read_all(self) -> None:
        while (reference := self._readings.get()) is not None:
            self._read(reference())

    def _read(self, reading: FileRead | None) -> None:
        if reading is not None:  # else nobody needs it any more
            with suppress(Exception):  # whoever asks for it reads it again, and is told
                reading.carry_out(self._file, self._take)

    def _take(self, nbytes: int) -> memoryview:
        return self._slabs.take(self._slab_bytes) if nbytes <= self._slab_bytes else allocate(nbytes)
