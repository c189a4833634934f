"""Saved tensors wait on a disk: written out by one thread, read by another before they are asked for."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch
from torch import Tensor

from retrograd.core.addresses import local_folder
from retrograd.core.notices import warn
from retrograd.memory.policies.policy import Packed, Policy, Saved, UsedPolicy
from retrograd.memory.policies.spill_file import (
    CHUNK,
    SpillFile,
    allocate,
    default_folder,
    mark_ready,
    open_spill_file,
    whole_blocks,
)
from retrograd.memory.policies.spill_threads import FileRange, SpillReader, SpillWriter
from retrograd.memory.policies.transfers import AskOrder, PackPosition

_WINDOW = 0.08
"""What is read ahead, as a share of what the pass has packed: a half is read while the other one is used."""
_MOST_AHEAD = 256 << 20
"""So many bytes are read ahead, however much the pass has packed: more would not come any faster."""
_LEAST_AHEAD = 2
"""So many ranges are read ahead, however large they are."""


class Spilled(FileRange):
    """A storage range that a spill has taken over."""

    __slots__ = ("_device", "_dtype", "_spill", "position")

    def __init__(self, values: Tensor, spill: Spill) -> None:
        self.resident_bytes = 0
        self.nbytes = values.nbytes
        self.values = values
        self.ready = mark_ready(values)
        self.extent = None
        self.coming = None
        self.is_wanted = False
        self._spill = spill
        self._dtype = values.dtype
        self._device = values.device
        self.position: PackPosition = spill.order.add(self, self.nbytes)

    def restore(self) -> Tensor:
        """Return the values, and have those read that are asked for next."""
        self.is_wanted = True
        self._spill.look_ahead(self.position, is_missed=self.values is None and self.coming is None)
        return self.take()

    def notice(self) -> None:
        """Have those read that are asked for next."""
        self.is_wanted = True
        self._spill.look_ahead(self.position, is_missed=False)

    def want(self) -> None:
        """Record that it is asked for, by one who knows what comes next: nothing is read ahead."""
        self.is_wanted = True
        asked = self.position.of.asked
        if not asked:  # else what is packed from now on would be added to this pass, for ever
            asked.append(self.position.number)

    def fetch(self) -> None:
        """Have it read, into memory of its own."""
        self._spill.fetch(self)

    def leave(self) -> None:
        """Do nothing: the memory is freed when it is written."""

    def take(self) -> Tensor:
        """Return the values: still to be written, read ahead, or read now, to the device where they were.

        Raises:
            OSError: they cannot be read.
        """
        here = self.values
        if here is not None:
            return here
        coming, self.coming = self.coming, None
        memory, place = None, 0
        if coming is not None:
            reading, place = coming
            if reading.memory is None and not self._spill.is_foreign:
                reading.wait()
            memory = reading.memory
        if memory is None:
            memory, place = self._read(), 0
        count = self.nbytes // self._dtype.itemsize
        values = torch.frombuffer(memory, dtype=self._dtype, count=count, offset=place)
        return values if self._device.type == "cpu" else values.to(self._device)

    def _read(self) -> memoryview:
        extent = self.extent
        assert extent is not None, "what is not in memory is on the disk"
        memory = allocate(extent.length)
        self._spill.file.read(extent.offset, memory)
        return memory

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
        self.order: AskOrder[Spilled] = AskOrder()
        self._process = os.getpid()
        self._adding = threading.Lock()
        self._writer = SpillWriter(self.file, max_waiting)
        self._reader = SpillReader(self.file)

    @property
    def is_foreign(self) -> bool:
        """Whether this process was forked from the one whose threads these are."""
        return os.getpid() != self._process

    @property
    def failure(self) -> Exception | None:
        """The error after which nothing is written any more."""
        return self._writer.failure

    def add(self, values: Tensor) -> Spilled:
        """Take over a storage range; waits while too much is to be written."""
        with self._adding:
            spilled = Spilled(values, self)
        self._writer.add(spilled)
        return spilled

    def look_ahead(self, position: PackPosition, *, is_missed: bool) -> None:
        """Have read what will be asked for next, as soon as less than half of the window is in flight.

        Args:
            position: of what is asked for.
            is_missed: it was not read ahead, so that neither may be what follows.
        """
        self.order.ask(position)
        window = min(int(_WINDOW * position.of.nbytes), _MOST_AHEAD)
        due = self.order.due(position, window, _LEAST_AHEAD, is_missed=is_missed)
        if due and not self.is_foreign:
            self._reader.begin(due, min(whole_blocks(window // 2), CHUNK))

    def fetch(self, spilled: Spilled) -> None:
        """Have one range read, into memory of its own."""
        if not self.is_foreign:
            self._reader.begin([spilled], 0)

    def flush(self) -> None:
        """Wait until all that was taken over is written, or is in memory for good."""
        if not self.is_foreign:
            self._writer.flush()

    def stop(self) -> None:
        """End the threads, when what waits is written."""
        if not self.is_foreign:
            self._writer.stop()
            self._reader.stop()


_MAX_WAITING = 256 << 20
_MIN_BYTES = 4 * Policy.min_bytes


class Disk(UsedPolicy):
    """Write what is saved to a file by another thread, and read it again shortly before it is needed.

    There is one file for the process, without a name, so that it vanishes also after ``kill -9``. It is written around
    the page cache; space that is free again is used again. Reading ahead follows the order of the last step, and at
    first the reverse of the forward. If the disk is full or gone, the rest stays in memory, with one warning.

    Args:
        folder: where the file is; ``TMPDIR`` or ``/var/tmp`` by default. It should not be a file system in memory.
        max_waiting: how many bytes may wait to be written. A forward pass that is faster than the disk waits then.
        min_bytes: smaller storage ranges stay. To move one takes some 100 µs of processor time, whatever its size:
            in a ResNet-50 at 96 pixels a third of them is smaller than the default, with a sixteenth of the bytes.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        max_waiting: int = _MAX_WAITING,
        min_bytes: int = _MIN_BYTES,
    ) -> None:
        super().__init__()
        self.folder = local_folder(default_folder() if folder is None else folder)
        self.max_waiting = max_waiting
        self.min_bytes = min_bytes
        self._spill: Spill | None = None
        self._starting = threading.Lock()
        self.has_failed = False

    def pack(self, saved: Saved) -> Packed | None:
        """Hand the memory to the thread that writes it; None once the disk has failed."""
        if saved.values.device.type not in ("cpu", "cuda"):
            return None
        if saved.values.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # a graph repeats kernels, and nobody would write what they give
        spill = self._spill
        if spill is None or spill.is_foreign:
            spill = self._start()
        if spill is None:
            return None
        if spill.failure is not None:
            self._warn(spill.failure)
            return None
        return spill.add(saved.values)

    def flush(self) -> None:
        """Wait until all that was packed so far is on the disk."""
        if self._spill is not None:
            self._spill.flush()

    def release(self) -> None:
        """End the threads. The file ends when nothing in it is needed."""
        spill, self._spill = self._spill, None
        if spill is not None:
            spill.stop()
            if spill.failure is not None:
                self._warn(spill.failure)
        self.has_failed = False

    def __repr__(self) -> str:
        waiting = "" if self.max_waiting == _MAX_WAITING else f", max_waiting={self.max_waiting}"
        least = "" if self.min_bytes == _MIN_BYTES else f", min_bytes={self.min_bytes}"
        return f"{type(self).__name__}({str(self.folder)!r}{waiting}{least})"

    def _start(self) -> Spill | None:
        if self._spill is not None and self._spill.is_foreign:
            self._starting, self._spill, self.has_failed = threading.Lock(), None, False
        with self._starting:
            if self._spill is None and not self.has_failed:
                try:
                    self._spill = Spill(self.folder, self.max_waiting)
                except OSError as error:
                    self._warn(error)
            return self._spill

    def _warn(self, error: Exception) -> None:
        if not self.has_failed:
            self.has_failed = True
            warn(f"Saved tensors stay in memory from now on: {self.folder} cannot be written to ({error}).")
