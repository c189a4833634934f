"""When memory of a device is copied to the host and back.

Which copies there are is decided here, on any machine; how they are made is the business of a :class:`CopyEngine`.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from retrograd.policies.buffer_pool import BufferPool
from retrograd.policies.in_flight import UnderWay
from retrograd.policies.order import Order, Position
from retrograd.policies.policy import Packed

Ticket = Any
"""Stands for a copy that was asked for and may still be under way."""


class CopyEngine(Protocol):
    """Copies that run beside the computation, each direction in an order of its own."""

    def allocate(self, nbytes: int) -> Tensor:
        """Host memory that the device can copy from and to.

        Raises:
            RuntimeError: there is none.
        """

    def copy_out(self, values: Tensor, buffer: Tensor) -> Ticket:
        """Begin to copy values into a buffer of their size, after what computes them.

        All copies to and from that memory that were begun before have been waited for.
        """

    def copy_in(
        self, buffer: Tensor, like: Tensor, numel: int, out: Ticket, *, is_urgent: bool
    ) -> tuple[Tensor, Ticket]:
        """Begin to copy a buffer into new memory of the device, after the copy out into that buffer.

        What is urgent comes before what was fetched ahead.

        Raises:
            torch.OutOfMemoryError: there is no such memory.
        """

    def wait(self, ticket: Ticket) -> None:
        """Let what is computed from now on begin after that copy. The program itself does not wait."""


class Offloaded(Packed):
    """A stretch of device memory on its way to the host, there, or on its way back.

    Attributes:
        values: the memory on the device, until the copy out is known to come before whatever is computed next.
        arriving: memory on the device that is being filled, and the ticket of that copy.
        out: the ticket of the copy out; None before it has begun.
    """

    __slots__ = ("_buffer", "_like", "_numel", "_offloader", "arriving", "nbytes", "out", "position", "values")

    def __init__(self, values: Tensor, buffer: Tensor, offloader: Offloader) -> None:
        super().__init__()
        self._offloader = offloader
        self._buffer = buffer
        self.values: Tensor | None = values
        self.arriving: tuple[Tensor, Ticket] | None = None
        self.out: Ticket = None
        self.nbytes = values.nbytes
        self._numel = values.numel()
        self._like = values.new_empty(0)
        self.out = offloader.engine.copy_out(values, buffer)
        self.position: Position = offloader.order.add(self, values.nbytes)

    def restore(self) -> Tensor:
        """The values: still there, already on their way, or fetched now."""
        values = self.values
        if values is None:
            (values, ticket), self.arriving = self.arriving or self._fetch_at_once(), None
            self._offloader.engine.wait(ticket)
        self.notice()
        return values

    def notice(self) -> None:
        """Those that are asked for next are fetched."""
        self._offloader.order.ask(self.position)
        self._offloader.look_ahead(self.position)

    def fetch(self) -> bool:
        """Begin to copy the values back, unless that was begun; False where there is no memory for them yet."""
        if self.arriving is None:
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
            self._offloader.engine.wait(self.out)
            self.values = None

    def _fetch_at_once(self) -> tuple[Tensor, Ticket]:
        """Copy the values back before all else. What was fetched ahead gives way: it is in the host's memory still."""
        try:
            return self._copy_in(is_urgent=True)
        except torch.OutOfMemoryError:
            if not self._offloader.drop_ahead(self.position):
                raise
        return self._copy_in(is_urgent=True)

    def _copy_in(self, *, is_urgent: bool) -> tuple[Tensor, Ticket]:
        engine = self._offloader.engine
        return engine.copy_in(self._buffer, self._like, self._numel, self.out, is_urgent=is_urgent)

    def __del__(self) -> None:
        engine = self._offloader.engine
        if self.values is not None and self.out is not None:
            engine.wait(self.out)  # the memory is about to be used for something else
        self.drop()
        self._offloader.pool.give(self._buffer)


class Offloader:
    """Takes memory of a device to the host, and brings it back before it is needed.

    Copies out that are under way hold their memory. As soon as they hold more than the window, the oldest is waited
    for, by the device and not by the program, so that the peak does not depend on chance. The last one is never waited
    for at once, however large it is: nothing would be computed beside it. What the last backward pass of this kind
    asked for first is not taken out at all: it would have to turn round on the way.

    Args:
        engine: makes the copies.
        window: bytes of copies that may be under way in each direction.
        limit: bytes of host memory; what finds no room stays on the device.
    """

    def __init__(self, engine: CopyEngine, window: int, limit: int | None = None) -> None:
        self.engine = engine
        self.order: Order[Offloaded | Stayed] = Order()
        self.pool = BufferPool(engine.allocate, limit)
        self._window = window
        self._leaving: UnderWay[ref[Offloaded]] = UnderWay()
        self._adding = threading.Lock()

    def add(self, values: Tensor) -> Packed | None:
        """Take a stretch of memory out; None where there is no room for it."""
        with self._adding:
            if self.order.is_needed_first(values.nbytes, self._window):
                return Stayed(values, self)
            buffer = self.pool.take(values.nbytes)
            if buffer is None:
                return None
            offloaded = Offloaded(values, buffer, self)
            for reference in self._leaving.add(ref(offloaded), offloaded.nbytes, self._window):
                if (leaving := reference()) is not None:
                    leaving.leave()
            return offloaded

    def look_ahead(self, position: Position) -> None:
        """Begin to bring back what will be asked for next, as much as the window holds."""
        budget = self._window
        for count, item in enumerate(self.order.upcoming(position)):
            budget -= item.nbytes
            if budget < 0 and count:
                break
            if isinstance(item, Offloaded) and item.values is None and not item.fetch():
                break

    def drop_ahead(self, position: Position) -> bool:
        """Free what was fetched ahead in the pass of this one; returns whether there was anything."""
        items = (reference() for reference in position.of.items)
        return sum(item.drop() for item in items if isinstance(item, Offloaded)) > 0


class Stayed(Packed):
    """A stretch of memory that is needed so soon that it does not leave."""

    __slots__ = ("_offloader", "_values", "nbytes", "position")

    def __init__(self, values: Tensor, offloader: Offloader) -> None:
        super().__init__(values.nbytes)
        self._offloader = offloader
        self._values = values
        self.nbytes = values.nbytes
        self.position: Position = offloader.order.add(self, values.nbytes)

    def restore(self) -> Tensor:
        """The values."""
        self.notice()
        return self._values

    def notice(self) -> None:
        """Those that are asked for next are fetched."""
        self._offloader.order.ask(self.position)
        self._offloader.look_ahead(self.position)
