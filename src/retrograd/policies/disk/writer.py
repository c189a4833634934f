"""A thread that writes stretches of memory to a file, many at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from itertools import accumulate
from queue import SimpleQueue

from retrograd.policies.disk.file import CHUNK, SpillFile
from retrograd.policies.disk.free_space import Extent
from retrograd.policies.disk.host_copy import fetch
from retrograd.policies.disk.pages import whole_blocks
from retrograd.policies.disk.stretch import Stretch


class SpillWriter:
    """Writes what it is given, in batches: to wake a thread for each stretch costs more than to write it.

    Args:
        file: where to.
        max_waiting: how many bytes may wait to be written.

    Attributes:
        failure: why it writes no more.
    """

    def __init__(self, file: SpillFile, max_waiting: int) -> None:
        self.failure: Exception | None = None
        self._file = file
        self._max_waiting = max_waiting
        self._batch_bytes = min(CHUNK, max_waiting // 2)  # one is filled while the other one is written
        self._added = 0  # bytes, ever; so is the next
        self._done = 0
        self._batch: list[weakref.ref[Stretch]] = []
        self._batched = 0  # bytes of the batch
        self._adding = threading.Lock()
        self._has_room = threading.Condition()
        self._batches: SimpleQueue[tuple[list[weakref.ref[Stretch]], int] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="retrograd-disk-writer", daemon=True)
        self._thread.start()

    def add(self, stretch: Stretch) -> None:
        """Take over a stretch of memory; waits while too much is to be written."""
        nbytes = stretch.nbytes
        with self._adding:
            self._batch.append(weakref.ref(stretch))
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

    def _write(self, batch: Sequence[Stretch | None]) -> None:
        """Move memory to the disk, one stretch behind the other; what is needed meanwhile stays."""
        here = [one for one in batch if one is not None and not one.is_wanted]
        waiting = [(one, one.values) for one in here if one.values is not None]
        if not waiting:
            return
        lengths = [whole_blocks(stretch.nbytes) for stretch, _ in waiting]
        room = self._file.take(sum(lengths))
        try:
            self._file.write((fetch(values, stretch.ready) for stretch, values in waiting), room)
        except Exception:
            self._file.give(room)
            raise
        offsets = accumulate(lengths, initial=room.offset)
        for (stretch, _), offset, length in zip(waiting, offsets, lengths, strict=False):  # the last offset is the end
            stretch.extent = Extent(offset, length)
            if not stretch.is_wanted:
                stretch.values = None
