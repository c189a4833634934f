"""Two threads that move stretches of memory: one writes them out, the other reads them before they are asked for."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue

from torch import Tensor

from retrograd.saved.free_space import Extent
from retrograd.saved.host_copy import HostCopy
from retrograd.saved.order import Order, Position
from retrograd.saved.policy import Packed
from retrograd.saved.read_buffers import ReadBuffers
from retrograd.saved.spill_file import CHUNK, SpillFile, open_spill_file, whole_blocks

_WINDOW = 0.08
"""What is read ahead, as a share of what the pass has packed: a half is read while the other one is used."""
_MOST_AHEAD = 256 << 20
"""So many bytes are read ahead, however much the pass has packed: more would not come any faster."""
_LEAST_AHEAD = 2
"""So many stretches are read ahead, however large they are."""


class Spilled(Packed):
    """A stretch of memory on its way to the disk, there, or on its way back.

    Attributes:
        values: the memory, until it has been written; for good if it could not be.
        extent: where it is in the file.
        loaded: what has been read ahead.
        is_read: a lock that is held until it has been read ahead, with others; None before that was begun.
        is_wanted: it was asked for, so that it need not be written any more.
    """

    __slots__ = (
        "_device", "_dtype", "_spill", "extent", "is_read", "is_wanted", "loaded", "nbytes", "position", "values"
    )  # fmt: skip

    def __init__(self, values: Tensor, spill: Spill) -> None:
        super().__init__()
        self._spill = spill
        self._dtype = values.dtype
        self._device = values.device
        self.nbytes = values.nbytes
        self.values: HostCopy | None = HostCopy(values)
        self.extent: Extent | None = None
        self.loaded: Tensor | None = None
        self.is_read: threading.Lock | None = None
        self.is_wanted = False
        self.position: Position = spill.order.add(self, self.nbytes)

    def restore(self) -> Tensor:
        """The values: what was still to be written, what has been read ahead, or what is read now."""
        values = self.values
        self.notice()
        if values is not None:
            return values.values
        is_read = self.is_read
        if is_read is not None and not self._spill.is_foreign:
            with is_read:
                pass
        loaded, self.loaded, self.is_read = self.loaded, None, None
        return (self.read() if loaded is None else loaded).to(self._device, non_blocking=False)

    def notice(self) -> None:
        """Those that are asked for next are read ahead."""
        self.is_wanted = True
        self._spill.order.ask(self.position)
        self._spill.read_ahead(self.position)

    def read(self) -> Tensor:
        """What is in the file, in memory of the CPU."""
        extent = self.extent
        assert extent is not None, "what is not in memory is on the disk"
        raw = self._spill.take_buffer(extent.length)
        self._spill.file.read(extent.offset, [raw])
        return self.as_values(raw)

    def as_values(self, raw: Tensor) -> Tensor:
        """Bytes that were read, as the values that they are."""
        return raw[: self.nbytes].view(self._dtype)

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
        self._batch_bytes = min(CHUNK, max_waiting // 4)
        self._added = 0  # bytes, ever; so is the next
        self._done = 0
        self._batch: list[weakref.ref[Spilled]] = []
        self._batched = 0  # bytes of the batch
        self._handing = threading.Lock()  # something over to a thread, so that nothing comes after the end
        self._buffers = ReadBuffers()
        self._taking = threading.Lock()
        self._has_room = threading.Condition()
        self._to_write: SimpleQueue[tuple[list[weakref.ref[Spilled]], int] | None] = SimpleQueue()
        self._to_read: SimpleQueue[tuple[list[weakref.ref[Spilled]], threading.Lock] | None] = SimpleQueue()
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
        with self._handing:
            self._added += spilled.nbytes
            self._batch.append(weakref.ref(spilled))
            self._batched += spilled.nbytes
            if self._batched >= self._batch_bytes:
                self._send_batch()
        self._wait_until(max(self._max_waiting, spilled.nbytes))
        return spilled

    def read_ahead(self, position: Position) -> None:
        """Have read what will be asked for after this, as soon as less than half of the window is on its way."""
        if not self._threads or self.is_foreign:
            return
        window = min(int(_WINDOW * position.of.nbytes), _MOST_AHEAD)
        self._buffers.limit = window // 2
        ahead, missing = 0, list[Spilled]()
        for count, spilled in enumerate(self.order.upcoming(position)):
            if count >= _LEAST_AHEAD and ahead >= (window if missing else window // 2):
                break
            if spilled.values is None and spilled.is_read is None:
                missing.append(spilled)
            ahead += spilled.nbytes
        if not missing:
            return
        is_read = threading.Lock()
        is_read.acquire()
        with self._handing:
            if self._threads:
                for spilled in missing:
                    spilled.is_read = is_read
                self._to_read.put(([weakref.ref(spilled) for spilled in missing], is_read))

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
            with self._handing:
                self._send_batch()
            with self._has_room:
                self._has_room.wait_for(lambda: self._added - self._done <= waiting or self.failure is not None)

    def _send_batch(self) -> None:
        """Hand what has been added to the thread that writes: to wake it for each stretch costs more than to write."""
        if self._batch:
            self._to_write.put((self._batch, self._batched))
            self._batch, self._batched = [], 0

    def stop(self) -> None:
        """End the threads, when what waits is written."""
        if self.is_foreign:
            self._threads = []
            return
        with self._handing:
            self._send_batch()
            self._to_write.put(None)
            self._to_read.put(None)
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()

    def _write_all(self) -> None:
        while (batch := self._to_write.get()) is not None:
            references, nbytes = batch
            try:
                if self.failure is None:
                    self._write([reference() for reference in references])
            except OSError as error:
                self.failure = error.with_traceback(None)  # its frames hold what was to be written
            with self._has_room:
                self._done += nbytes
                self._has_room.notify_all()

    def _write(self, batch: list[Spilled | None]) -> None:
        """Move memory to the disk, one stretch behind the other; what has been asked for meanwhile stays."""
        waiting = [(one, one.values) for one in batch if one is not None and one.values and not one.is_wanted]
        if not waiting:
            return
        lengths = [whole_blocks(spilled.nbytes) for spilled, _ in waiting]
        room = self.file.take(sum(lengths))
        try:
            self.file.write((values.fetch() for _, values in waiting), room)
        except OSError:
            self.file.give(room)
            raise
        offsets = accumulate(lengths, initial=room.offset)
        for (spilled, _), offset, length in zip(waiting, offsets, lengths, strict=False):  # the last offset is the end
            spilled.extent = Extent(offset, length)
            spilled.values = None

    def _read_all(self) -> None:
        while (batch := self._to_read.get()) is not None:
            references, is_read = batch
            try:
                self._read([reference() for reference in references])
            finally:
                is_read.release()

    def _read(self, batch: list[Spilled | None]) -> None:
        """Read what is away and not asked for yet; what lies side by side in the file is read at once."""
        away = [(one.extent, one) for one in batch if one is not None and one.extent is not None and not one.is_wanted]
        runs: list[list[tuple[Extent, Spilled]]] = []
        end = -1
        for extent, spilled in sorted(away, key=lambda pair: pair[0].offset):
            if extent.offset != end:
                runs.append([])
            runs[-1].append((extent, spilled))
            end = extent.offset + extent.length
        for run in runs:
            raws = [self.take_buffer(extent.length) for extent, _ in run]
            with suppress(OSError):  # whoever asks for it reads it again, and is told
                self.file.read(run[0][0].offset, raws)
                for raw, (_, spilled) in zip(raws, run, strict=True):
                    spilled.loaded = spilled.as_values(raw)
