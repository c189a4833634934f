"""Stretches of memory that wait in a file: written out by one thread, read by another before they are asked for."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch
from torch import Tensor

from retrograd.policies.disk.file import CHUNK, SpillFile, open_spill_file
from retrograd.policies.disk.host_copy import mark_ready
from retrograd.policies.disk.pages import allocate, whole_blocks
from retrograd.policies.disk.reader import SpillReader
from retrograd.policies.disk.stretch import Stretch
from retrograd.policies.disk.writer import SpillWriter
from retrograd.policies.order import Order, Position

_WINDOW = 0.08
"""What is read ahead, as a share of what the pass has packed: a half is read while the other one is used."""
_MOST_AHEAD = 256 << 20
"""So many bytes are read ahead, however much the pass has packed: more would not come any faster."""
_LEAST_AHEAD = 2
"""So many stretches are read ahead, however large they are."""


class Spilled(Stretch):
    """A stretch of memory that a spill has taken over."""

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
        self.position: Position = spill.order.add(self, self.nbytes)

    def restore(self) -> Tensor:
        """The values: what was still to be written, what has been read ahead, or what is read now."""
        self.is_wanted = True
        values = self.values
        self._spill.look_ahead(self.position, is_missed=values is None and self.coming is None)
        return self.take() if values is None else values

    def notice(self) -> None:
        """Those that are asked for next are read ahead."""
        self.is_wanted = True
        self._spill.look_ahead(self.position, is_missed=False)

    def want(self) -> None:
        """It is asked for, and who asks knows what comes next: nothing is read ahead."""
        self.is_wanted = True
        asked = self.position.of.asked
        if not asked:  # else what is packed from now on would be added to this pass, for ever
            asked.append(self.position.number)

    def fetch(self) -> None:
        """Have it read, into memory of its own."""
        self._spill.fetch(self)

    def take(self) -> Tensor:
        """What is in the file, on the device where it was.

        Raises:
            OSError: it cannot be read.
        """
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
        self.order: Order[Spilled] = Order()
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
        """Why nothing is written any more."""
        return self._writer.failure

    def add(self, values: Tensor) -> Spilled:
        """Take over a stretch of memory; waits while too much is to be written."""
        with self._adding:
            spilled = Spilled(values, self)
        if not spilled.position.number:  # a forward pass begins
            self._reader.rest()
        self._writer.add(spilled)
        return spilled

    def look_ahead(self, position: Position, *, is_missed: bool) -> None:
        """Have read what will be asked for next, as soon as less than half of the window is on its way.

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
        """Have one stretch read, into memory of its own."""
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
