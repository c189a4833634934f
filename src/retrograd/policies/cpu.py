"""Keep saved tensors of a CUDA device in memory of the host: which copies are made, and when.

How a copy is made is the business of ``cuda_copies.py``; nothing here needs a device.
"""

from __future__ import annotations

import threading
from weakref import ref

import torch
from torch import Tensor

from retrograd.policies.buffer_pool import BufferPool
from retrograd.policies.cuda_copies import CudaCopies, CudaCopy
from retrograd.policies.in_flight import InFlight
from retrograd.policies.order import AskOrder, PackPosition
from retrograd.policies.policy import Packed, Policy, Saved


class Offloaded(Packed):
    """A range of device storage in flight to the host, there, or in flight back.

    Attributes:
        values: the memory on the device, until the copy out is known to come before whatever is computed next.
        arriving: memory on the device that is being filled, and the copy that fills it.
        out: the copy out; None before it has begun.
    """

    __slots__ = ("_buffer", "_like", "_numel", "_offloader", "arriving", "nbytes", "out", "position", "values")

    def __init__(self, values: Tensor, buffer: Tensor, offloader: HostOffloader) -> None:
        super().__init__()
        self._offloader = offloader
        self._buffer = buffer
        self.values: Tensor | None = values
        self.arriving: tuple[Tensor, CudaCopy] | None = None
        self.out: CudaCopy | None = None
        self.nbytes = values.nbytes
        self._numel = values.numel()
        self._like = values.new_empty(0)
        self.out = offloader.engine.copy_out(values, buffer)
        self.position: PackPosition = offloader.order.add(self, values.nbytes)

    def restore(self) -> Tensor:
        """Return the values, and begin to fetch those that are asked for next."""
        values = self.take()
        self._offloader.look_ahead(self.position)
        return values

    def notice(self) -> None:
        """Begin to fetch those that are asked for next."""
        self.want()
        self._offloader.look_ahead(self.position)

    def want(self) -> None:
        """Note that it is asked for; what is packed next begins another pass."""
        self._offloader.order.ask(self.position)

    def take(self) -> Tensor:
        """Return the values: still there, already in flight, or fetched now; the device waits for them."""
        values = self.values
        if values is None:
            (values, copying), self.arriving = self.arriving or self._fetch_at_once(), None
            self._offloader.engine.wait(copying)
        self.want()
        return values

    def fetch(self) -> bool:
        """Begin to copy the values back if they are away; False where there is no memory for them yet."""
        if self.values is None and self.arriving is None:
            try:
                self.arriving = self._copy_in(is_urgent=False)
            except torch.OutOfMemoryError:
                return False
        return True

    def drop(self) -> bool:
        """Free the memory that is being filled; returns whether there was any."""
        if self.arriving is None:
            return False
        self._offloader.engine.wait(self.arriving[1])
        self.arriving = None
        return True

    def leave(self) -> None:
        """Free the device memory: what is computed from now on comes after the copy out."""
        if self.values is not None:
            assert self.out is not None
            self._offloader.engine.wait(self.out)
            self.values = None

    def _fetch_at_once(self) -> tuple[Tensor, CudaCopy]:
        """Copy the values back before all else. What was fetched ahead gives way: it is in the host's memory still."""
        try:
            return self._copy_in(is_urgent=True)
        except torch.OutOfMemoryError:
            if not self._offloader.drop_ahead(self.position):
                raise
        return self._copy_in(is_urgent=True)

    def _copy_in(self, *, is_urgent: bool) -> tuple[Tensor, CudaCopy]:
        assert self.out is not None
        engine = self._offloader.engine
        return engine.copy_in(self._buffer, self._like, self._numel, self.out, is_urgent=is_urgent)

    def __del__(self) -> None:
        engine = self._offloader.engine
        if self.values is not None and self.out is not None:
            engine.wait(self.out)  # the memory is about to be used for something else
        self.drop()
        self._offloader.pool.give(self._buffer)


class HostOffloader:
    """Takes memory of a device to the host, and brings it back before it is needed.

    Copies out that are in flight hold their memory. As soon as they hold more than the window, the oldest is waited
    for, by the device and not by the program, so that the peak does not depend on chance. The last one is never waited
    for at once, however large it is: nothing would be computed beside it. What the last backward pass of this kind
    asked for first is not taken out at all: it would have to turn round on the way.

    Args:
        engine: makes the copies.
        window: bytes of copies that may be in flight in each direction.
        limit: bytes of host memory; what finds no room stays on the device.
    """

    def __init__(self, engine: CudaCopies, window: int, limit: int | None = None) -> None:
        self.engine = engine
        self.order: AskOrder[Offloaded | Stayed] = AskOrder()
        self.pool = BufferPool(engine.allocate, limit)
        self._window = window
        self._leaving: InFlight[ref[Offloaded]] = InFlight()
        self._adding = threading.Lock()

    def add(self, values: Tensor) -> Packed | None:
        """Take a storage range out; None where there is no room for it."""
        with self._adding:
            if self.order.is_needed_first(values.nbytes, self._window):
                return Stayed(values, self)
            offloaded = self.copy_out(values)
            if offloaded is None:
                return None
            for reference in self._leaving.add(ref(offloaded), offloaded.nbytes, self._window):
                if (leaving := reference()) is not None:
                    leaving.leave()
            return offloaded

    def copy_out(self, values: Tensor) -> Offloaded | None:
        """Begin to copy a range out, and leave it to the caller when it is freed; None: there is no room for it."""
        buffer = self.pool.take(values.nbytes)
        return None if buffer is None else Offloaded(values, buffer, self)

    def look_ahead(self, position: PackPosition) -> None:
        """Begin to bring back what will be asked for next, as much as the window holds."""
        budget = self._window
        for count, item in enumerate(self.order.upcoming(position)):
            budget -= item.nbytes
            if budget < 0 and count:
                break
            if isinstance(item, Offloaded) and not item.fetch():
                break

    def drop_ahead(self, position: PackPosition) -> bool:
        """Free what was fetched ahead in the pass of this one; returns whether there was anything."""
        items = (reference() for reference in position.of.items)
        return sum(item.drop() for item in items if isinstance(item, Offloaded)) > 0


class Stayed(Packed):
    """A storage range that is needed so soon that it does not leave."""

    __slots__ = ("_offloader", "_values", "nbytes", "position")

    def __init__(self, values: Tensor, offloader: HostOffloader) -> None:
        super().__init__(values.nbytes)
        self._offloader = offloader
        self._values = values
        self.nbytes = values.nbytes
        self.position: PackPosition = offloader.order.add(self, values.nbytes)

    def restore(self) -> Tensor:
        """The values."""
        self.notice()
        return self._values

    def notice(self) -> None:
        """Begin to fetch those that are asked for next."""
        self._offloader.order.ask(self.position)
        self._offloader.look_ahead(self.position)


_WINDOW = 512 << 20


class Cpu(Policy):
    """Copy what a CUDA device saves to pinned host memory, and back before it is needed; the CPU's own stays.

    Copies run on two streams beside the computation. Pinned memory is used again from step to step; the order in which
    the last backward pass asked is the order in which things are brought back. What it asked for first does not leave.
    While a CUDA graph is captured everything stays: the graph would repeat the copies into memory that is no longer
    there. Where the host has no more memory to pin, the rest stays, with one warning.

    Args:
        window: bytes of copies in flight in each direction; so much of what was saved is on the device at any time.
        limit: bytes of host memory, at most; what finds no room there stays on the device.
        min_bytes: smaller storage ranges stay.
    """

    def __init__(
        self, *, window: int = _WINDOW, limit: int | None = None, min_bytes: int = 16 * Policy.min_bytes
    ) -> None:
        self.window = window
        self.limit = limit
        self.min_bytes = min_bytes
        self._users = 0
        self._offloaders: dict[torch.device, HostOffloader] = {}
        self._starting = threading.Lock()

    def pack(self, saved: Saved) -> Packed | None:
        """Begin to copy it out."""
        values = saved.values
        if not values.is_cuda or torch.cuda.is_current_stream_capturing():
            return None
        with self._starting:
            offloader = self._offloaders.get(values.device)
            if offloader is None:
                offloader = HostOffloader(CudaCopies(values.device), self.window, self.limit)
                self._offloaders[values.device] = offloader
        return offloader.add(values)

    def open(self) -> None:
        """Count one more user."""
        self._users += 1

    def close(self) -> None:
        """Count one user less; with the last one torch gets pinned memory back, as soon as nothing is packed in it.

        Torch keeps it for the next one who asks; ``torch.accelerator.empty_host_cache()`` frees it.
        """
        self._users -= 1
        if not self._users:
            for offloader in self._offloaders.values():
                offloader.pool.clear()
            self._offloaders.clear()
