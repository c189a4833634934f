"""A thread that reads stretches of memory from a file before they are asked for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from queue import SimpleQueue

from retrograd.policies.disk.file import SpillFile
from retrograd.policies.disk.free_space import Extent
from retrograd.policies.disk.pages import allocate
from retrograd.policies.disk.reading import Reading
from retrograd.policies.disk.slabs import Slabs
from retrograd.policies.disk.stretch import Stretch


class SpillReader:
    """Reads what it is asked to, several stretches at once.

    Whoever asks lays down what is read to where, so that this thread does next to nothing between two calls of the
    kernel: what it does in Python, it does while the thread that computes cannot.

    Args:
        file: where from.
    """

    def __init__(self, file: SpillFile) -> None:
        self._file = file
        self._slabs = Slabs()
        self._slab_bytes = 0
        self._asking = threading.Lock()
        self._is_running = True
        self._readings: SimpleQueue[weakref.ref[Reading] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._read_all, name="retrograd-disk-reader", daemon=True)
        self._thread.start()

    def begin(self, stretches: Iterable[Stretch], together: int) -> None:
        """Have read what is away, and is not on its way back yet. What is here still stays.

        Args:
            stretches: in the order in which they are needed.
            together: so many bytes share a piece of memory, which is free again when all of them are used.
        """
        with self._asking:
            if not self._is_running:
                return
            self._slab_bytes = together
            group: list[tuple[Stretch, Extent]] = []
            nbytes = 0
            for stretch in stretches:
                stretch.is_wanted = True  # so that it is not written in the last moment
                extent = stretch.extent
                if extent is None or stretch.values is not None or stretch.coming is not None:
                    continue
                if group and nbytes + extent.length > together:
                    self._begin(group)
                    group, nbytes = [], 0
                group.append((stretch, extent))
                nbytes += extent.length
            if group:
                self._begin(group)

    def rest(self) -> None:
        """Hold no memory until the next request."""
        self._slabs.clear()

    def stop(self) -> None:
        """End the thread, when what was asked for is read."""
        with self._asking:
            self._is_running = False
            self._readings.put(None)
        self._thread.join()

    def _begin(self, group: list[tuple[Stretch, Extent]]) -> None:
        reading = Reading([extent for _, extent in group])
        self._readings.put(weakref.ref(reading))  # first: after an interrupt nobody waits for what never comes
        for (stretch, _), place in zip(group, reading.places, strict=True):
            stretch.coming = reading, place

    def _read_all(self) -> None:
        while (reference := self._readings.get()) is not None:
            self._read(reference())

    def _read(self, reading: Reading | None) -> None:
        if reading is not None:  # else nobody needs it any more
            with suppress(Exception):  # whoever asks for it reads it again, and is told
                reading.carry_out(self._file, self._take)

    def _take(self, nbytes: int) -> memoryview:
        return self._slabs.take(self._slab_bytes) if nbytes <= self._slab_bytes else allocate(nbytes)
