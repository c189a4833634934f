"""Ways out of memory and back that do only what a plan says: no order is guessed, and nothing is read ahead unasked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from retrograd.policies.buffer_pool import BufferPool
from retrograd.policies.cuda_copies import CudaCopies
from retrograd.policies.disk.disk import Disk
from retrograd.policies.disk.spill import Spilled
from retrograd.policies.offloading import CopyEngine, Offloaded, Offloader
from retrograd.policies.order import Position
from retrograd.policies.policy import Saved


class Load(Protocol):
    """A stretch of memory that a carrier has taken over."""

    def leave(self) -> None:
        """What was copied out is freed."""

    def want(self) -> None:
        """It is asked for: a copy out that has not begun may be left out."""

    def fetch(self) -> None:
        """Begin to bring it back."""

    def take(self) -> Tensor:
        """The values again; waits for them."""


class Carrier(Protocol):
    """Takes stretches of memory elsewhere.

    Attributes:
        destination: where, in a word.
    """

    destination: str

    def carry_out(self, saved: Saved) -> Load | None:
        """Begin to copy a stretch out, and wait until no more than the window is under way; None: it has to stay."""

    def finish(self) -> None:
        """Wait until all copies out are done."""

    def trim(self) -> None:
        """Hold no memory for later: it was of use while a pass was measured."""

    def close(self) -> None:
        """End threads. What is elsewhere still comes back."""


class DiskCarrier:
    """To a file and back.

    Args:
        folder: where the file is; None for the default of :class:`Disk`.
        window: bytes that may wait to be written.
    """

    destination = "disk"

    def __init__(self, folder: str | os.PathLike[str] | None, window: int) -> None:
        self._disk = Disk(None if folder is None else Path(folder), max_waiting=window, min_bytes=0)
        self._disk.open()

    def carry_out(self, saved: Saved) -> Load | None:
        """Hand it to the thread that writes."""
        spilled = self._disk.pack(saved)
        return DiskLoad(spilled) if isinstance(spilled, Spilled) else None

    def finish(self) -> None:
        """Wait until all is written."""
        self._disk.flush()

    def trim(self) -> None:
        """There is none: the file is as long as it was, and parts of it are free."""

    def close(self) -> None:
        """End the threads."""
        self._disk.close()


class DiskLoad:
    """A stretch of memory in a file, or on its way there or back."""

    __slots__ = ("_spilled",)

    def __init__(self, spilled: Spilled) -> None:
        self._spilled = spilled

    def leave(self) -> None:
        """It is freed when it is written."""

    def want(self) -> None:
        """It need not be written any more."""
        self._spilled.want()

    def fetch(self) -> None:
        """Have it read by another thread."""
        self._spilled.fetch()

    def take(self) -> Tensor:
        """What was still to be written, has been read, or is read now."""
        values = self._spilled.values
        return self._spilled.take() if values is None else values


class HostCarrier:
    """From a CUDA device to pinned memory of the host and back.

    Args:
        engine: makes the copies; for a device if it is left out.
        device: the device.
    """

    destination = "host"

    def __init__(self, device: torch.device, engine: CopyEngine | None = None) -> None:
        self._porter = Porter(CudaCopies(device) if engine is None else engine, 0)

    def carry_out(self, saved: Saved) -> Load | None:
        """Begin to copy."""
        return self._porter.carry(saved.values)

    def finish(self) -> None:
        """Copies are waited for by the device, when what they copied leaves."""

    def trim(self) -> None:
        """Give back pinned memory that is free."""
        self._porter.pool.clear()

    def close(self) -> None:
        """Give back pinned memory that is free."""
        self._porter.pool.clear()


class Porter(Offloader):
    """An offloader that brings nothing back unasked."""

    pool: BufferPool

    def look_ahead(self, position: Position) -> None:
        """Not here: a plan says when."""

    def carry(self, values: Tensor) -> Load | None:
        """Take a stretch out; None where there is no room for it."""
        buffer = self.pool.take(values.nbytes)
        return None if buffer is None else HostLoad(Offloaded(values, buffer, self))


class HostLoad:
    """A stretch of memory of a device that waits in the host's."""

    __slots__ = ("_offloaded",)

    def __init__(self, offloaded: Offloaded) -> None:
        self._offloaded = offloaded

    def leave(self) -> None:
        """Free the device memory."""
        self._offloaded.leave()

    def want(self) -> None:
        """Another pass begins with what is packed next."""
        self._offloaded.notice()

    def fetch(self) -> None:
        """Begin to copy it back."""
        if self._offloaded.values is None:
            self._offloaded.fetch()

    def take(self) -> Tensor:
        """The values; the device waits for them."""
        return self._offloaded.restore()
