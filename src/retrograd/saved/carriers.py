"""Ways out of memory and back that do only what a plan says: no order is guessed, and nothing is read ahead unasked."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from retrograd.saved.buffer_pool import BufferPool
from retrograd.saved.cuda_copies import CudaCopies
from retrograd.saved.disk import Disk
from retrograd.saved.offloading import CopyEngine, Offloaded, Offloader
from retrograd.saved.order import Position
from retrograd.saved.policy import Saved
from retrograd.saved.spilling import Spilled


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
        self._process = os.getpid()
        self._reader: ThreadPoolExecutor | None = ThreadPoolExecutor(1, thread_name_prefix="retrograd-plan-reader")

    def carry_out(self, saved: Saved) -> Load | None:
        """Hand it to the thread that writes."""
        spilled = self._disk.pack(saved)
        return DiskLoad(spilled, self) if isinstance(spilled, Spilled) else None

    def read(self, spilled: Spilled) -> Future[Tensor] | None:
        """Begin to read; None if there is nobody to do it."""
        if self._reader is None or os.getpid() != self._process:
            return None
        return self._reader.submit(spilled.read)

    def finish(self) -> None:
        """Wait until all is written."""
        self._disk.flush()

    def close(self) -> None:
        """End the threads."""
        reader, self._reader = self._reader, None
        if reader is not None and os.getpid() == self._process:
            reader.shutdown()
        self._disk.close()


class DiskLoad:
    """A stretch of memory in a file, or on its way there or back."""

    __slots__ = ("_arriving", "_carrier", "_spilled")

    def __init__(self, spilled: Spilled, carrier: DiskCarrier) -> None:
        self._spilled = spilled
        self._carrier = carrier
        self._arriving: Future[Tensor] | None = None

    def leave(self) -> None:
        """It is freed when it is written."""

    def want(self) -> None:
        """It need not be written any more."""
        self._spilled.is_wanted = True
        position = self._spilled.position
        if not position.of.asked:  # else what is packed from now on would be added to this pass, for ever
            position.of.asked.append(position.number)

    def fetch(self) -> None:
        """Have it read by another thread."""
        if self._arriving is None and self._spilled.values is None:
            self._arriving = self._carrier.read(self._spilled)

    def take(self) -> Tensor:
        """What was still to be written, has been read, or is read now."""
        waiting = self._spilled.values
        if waiting is not None:
            return waiting.values
        arriving, self._arriving = self._arriving, None
        return self._spilled.read() if arriving is None else arriving.result()


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
