"""Saved tensors wait on a disk."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch

from retrograd.notices import warn
from retrograd.policies.disk.file import default_folder
from retrograd.policies.disk.spill import Spill
from retrograd.policies.policy import Packed, Policy, Saved

_MAX_WAITING = 256 << 20


class Disk(Policy):
    """What is saved is written to a file by another thread, and read again shortly before it is needed.

    There is one file for the process, without a name, so that it vanishes also after ``kill -9``. It is written around
    the page cache; space that is free again is used again. Reading ahead follows the order of the last step, and at
    first the reverse of the forward. If the disk is full or gone, the rest stays in memory, with one warning.

    Args:
        folder: where the file is; ``TMPDIR`` or ``/var/tmp`` by default. It should not be a file system in memory.
        max_waiting: how many bytes may wait to be written. A forward pass that is faster than the disk waits then.
        min_bytes: smaller stretches of memory stay. To move one takes some 100 µs of processor time, whatever its size:
            in a ResNet-50 at 96 pixels a third of them is smaller than the default, with a sixteenth of the bytes.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        max_waiting: int = _MAX_WAITING,
        min_bytes: int = 4 * Policy.min_bytes,
    ) -> None:
        self.folder = (default_folder() if folder is None else Path(folder)).absolute()
        self.max_waiting = max_waiting
        self.min_bytes = min_bytes
        self._users = 0
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

    def open(self) -> None:
        """One more uses it."""
        self._users += 1

    def close(self) -> None:
        """One less does; with the last one the threads end. The file ends when nothing in it is needed any more."""
        self._users -= 1
        spill = self._spill
        if not self._users and spill is not None:
            self._spill = None
            spill.stop()
            if spill.failure is not None:
                self._warn(spill.failure)
        if not self._users:
            self.has_failed = False

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
