"""Two threads that move stretches of memory: one writes them out, the other reads them before they are asked for."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from retrograd.saved.host_copy import HostCopy
from retrograd.saved.order import Order, Position
from retrograd.saved.policy import Packed
from retrograd.saved.read_buffers import ReadBuffers
from retrograd.saved.spill_file import Extent, SpillFile, open_spill_file

_WINDOW = 0.04
"""What is read ahead, as a share of what the pass has packed; it is all that is in memory twice."""
_LEAST_AHEAD = 2
"""So many stretches are read ahead, however large they are."""


class Spilled(Packed):
    """A stretch of memory on its way to the disk, there, or on its way back.

    Attributes:
        values: the memory, until it has been written; for good if it could not be.
        extent: where it is in the file.
        loaded: what has been read ahead.
        is_read: a lock that is held until reading ahead has ended; None before it was begun.
        is_wanted: it was asked for, so that it need not be written any more.
    """

    __slots__ = ("_like", "_numel", "_spill", "extent", "is_read", "is_wanted", "loaded", "position", "values")

    def __init__(self, values: Tensor, spill: Spill) -> None:
        super().__init__()
        self._spill = spill
        self._like = torch.empty(0, dtype=values.dtype, device=values.device)
        self._numel = values.numel()
        self.values: HostCopy | None = HostCopy(values)
        self.extent: Extent | None = None
        self.loaded: Tensor | None = None
        self.is_read: threading.Lock | None = None
        self.is_wanted = False
        self.position: Position = spill.order.add(self, values.nbytes)

    @property
    def nbytes(self) -> int:
        """Of the memory."""
        return self._numel * self._like.itemsize

    def restore(self) -> Tensor:
        """The values: what was still to be written, what has been read ahead, or what is read now."""
        values = self.values
        self.notice()
        if values is not None:
            return values.values
        spill = self._spill
        if self.is_read is not None and not spill.is_foreign:
            with self.is_read:
                pass
        loaded, self.loaded, self.is_read = self.loaded, None, None
        return (self.read() if loaded is None else loaded).to(self._like.device, non_blocking=False)

    def notice(self) -> None:
        """Those that are asked for next are read ahead."""
        self.is_wanted = True
        self._spill.order.ask(self.position)
        self._spill.read_ahead(self.position)

    def write(self) -> None:
        """Move the memory to the disk. In the writer's thread."""
        values = self.values
        if values is None or self.is_wanted:
            return
        file = self._spill.file
        extent = file.take(self.nbytes)
        try:
            file.write(values.fetch(), extent)
        except OSError:
            file.give(extent)
            raise
        self.extent = extent
        self.values = None

    def read(self) -> Tensor:
        """What is in the file, in memory of the CPU."""
        extent = self.extent
        assert extent is not None, "what is not in memory is on the disk"
        raw = self._spill.take_buffer(extent.length)
        self._spill.file.read(extent, raw)
        return raw[: self.nbytes].view(self._like.dtype)

    def __del__(self) -> None:
        extent = getattr(self, "extent", None)
        if extent is not None:
            self._spill.file.give(extent)


class Spill:
    """A file and the threads that serve it. The threads end with :meth:`stop`, the file with what is in it.

    Args:
        folder: where the file is.
        max_waiting: how many bytes may wait to be written; a forward pass that is faster waits then.

    Raises:
        OSError: there can be no file.
    """

    def __init__(self, folder: Path, max_waiting: int) -> None:
        self.file: SpillFile = open_spill_file(folder)
        self.order: Order[Spilled] = Order()
        self.failure: OSError | None = None
        self._process = os.getpid()
        self._max_waiting = max_waiting
        self._added = 0  # bytes, ever; so is the next
        self._done = 0
        self._adding = threading.Lock()
        self._buffers = ReadBuffers()
        self._taking = threading.Lock()
        self._has_room = threading.Condition()
        self._to_write: SimpleQueue[tuple[weakref.ref[Spilled], int] | None] = SimpleQueue()
        self._to_read: SimpleQueue[weakref.ref[Spilled] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=run, name=f"retrograd-disk-{name}", daemon=True)
            for name, run in (("writer", self._write_all), ("reader", self._read_all))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_foreign(self) -> bool:
        """Whether this process was forked from the one whose threads these are."""
        return os.getpid() != self._process

    def add(self, values: Tensor) -> Spilled:
        """Take over a stretch of memory; waits while too much is to be written."""
        spilled = Spilled(values, self)
        with self._adding:
            self._added += spilled.nbytes
        self._to_write.put((weakref.ref(spilled), spilled.nbytes))
        self._wait_until(max(self._max_waiting, spilled.nbytes))
        return spilled

    def read_ahead(self, position: Position) -> None:
        """Have read what will be asked for after this."""
        if not self._threads or self.is_foreign:
            return
        budget = self._buffers.limit = int(_WINDOW * position.of.nbytes)
        for count, spilled in enumerate(self.order.upcoming(position)):
            budget -= spilled.nbytes
            if budget < 0 and count >= _LEAST_AHEAD:
                break
            if spilled.values is None and spilled.is_read is None:
                spilled.is_read = threading.Lock()
                spilled.is_read.acquire()
                self._to_read.put(weakref.ref(spilled))

    def take_buffer(self, nbytes: int) -> Tensor:
        """Memory to read into."""
        if self.is_foreign:
            return ReadBuffers().take(nbytes)
        with self._taking:
            return self._buffers.take(nbytes)

    def flush(self) -> None:
        """Wait until all that was taken over is written, or is in memory for good."""
        self._wait_until(0)

    def _wait_until(self, waiting: int) -> None:
        """Wait until no more than so many bytes are still to be written."""
        if self._added - self._done > waiting and not self.is_foreign:
            with self._has_room:
                self._has_room.wait_for(lambda: self._added - self._done <= waiting or self.failure is not None)

    def stop(self) -> None:
        """End the threads, when what waits is written."""
        threads, self._threads = self._threads, []
        if self.is_foreign:
            return
        self._to_write.put(None)
        self._to_read.put(None)
        for thread in threads:
            thread.join()

    def _write_all(self) -> None:
        while (item := self._to_write.get()) is not None:
            reference, nbytes = item
            spilled = reference()
            try:
                if spilled is not None and self.failure is None:
                    spilled.write()
            except OSError as error:
                self.failure = error
            del spilled  # it may be the last reference
            with self._has_room:
                self._done += nbytes
                self._has_room.notify_all()

    def _read_all(self) -> None:
        while (reference := self._to_read.get()) is not None:
            spilled = reference()
            if spilled is not None:
                self._read(spilled)
            del spilled

    @staticmethod
    def _read(spilled: Spilled) -> None:
        is_read = spilled.is_read
        if is_read is None:
            return
        try:
            if not spilled.is_wanted:
                spilled.loaded = spilled.read()
        except OSError:
            spilled.loaded = None  # whoever asks for it reads it again, and is told
        finally:
            is_read.release()
