"""Keep saved tensors of a CUDA device in memory of the host: which copies are made, when, and into which memory.

``cuda_copies.py`` makes the copies; nothing here needs a device. Host memory is used again from step to step: asking
for pinned memory costs milliseconds.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from weakref import ref

import torch
from torch import Tensor

from retrograd.core.amounts import show_bytes
from retrograd.core.notices import warn
from retrograd.memory.policies.cuda_copies import CudaCopies, CudaCopy
from retrograd.memory.policies.policy import Packed, Policy, Saved, UsedPolicy
from retrograd.memory.policies.transfers import AskOrder, InFlight, PackPosition

_UNIT = 64 << 10
"""Buffers begin at multiples of this, in bytes."""
_LEAST = 64 << 20
_MOST = 1 << 30
"""Bytes of the smallest and of the largest piece that is asked for, unless a buffer is larger."""
_SHARE = 8
"""A new piece is no larger than such a part of all that there are, or the smallest: it may be the last."""


class BufferPool:
    """Buffers, cut out of large pieces of memory where it is tightest, and put together again when given back.

    Torch rounds pinned memory up to a power of two (``CachingHostAllocatorImpl::allocate``), which is a third more for
    the tensors of a ResNet; so pieces are powers of two, and buffers are not.

    Args:
        allocate: makes a piece of so many bytes; a RuntimeError says that there is no memory for it. When there is not
            even for as much as is asked for, what there is then is the limit from then on, with one warning.
        limit: how many bytes there may be; None for no limit.

    Attributes:
        nbytes: of all pieces, whether they are in use or free.
    """

    def __init__(self, allocate: Callable[[int], Tensor], limit: int | None = None) -> None:
        self.nbytes = 0
        self._allocate = allocate
        self._limit = limit
        self._pieces: dict[int, Tensor] = {}  # by address
        self._free: list[tuple[int, int, int]] = []  # size, piece, start; sorted
        self._starts: dict[tuple[int, int], int] = {}  # piece and start of what is free → its end
        self._ends: dict[tuple[int, int], int] = {}  # piece and end of what is free → its start
        self._returned: deque[Tensor] = deque()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Tensor | None:
        """Take a buffer of so many bytes; None where the limit, or the machine, leaves no room for it."""
        size = _round_up(nbytes)
        with self._lock:
            self._collect()
            at = bisect_left(self._free, (size, 0, 0))
            if at == len(self._free):
                if not self._grow(size):
                    return None
                at = bisect_left(self._free, (size, 0, 0))
            length, piece, start = self._free[at]
            self._use(start, start + length, piece)
            if length > size:
                self._release(start + size, start + length, piece)
            return self._pieces[piece][start : start + nbytes]

    def give(self, buffer: Tensor) -> None:
        """Record that a buffer is free again. Takes no lock: objects may be deleted at any moment."""
        self._returned.append(buffer)

    def clear(self) -> None:
        """Forget the pieces of which nothing is in use."""
        with self._lock:
            self._collect()
            for length, piece, start in list(self._free):
                if length == self._pieces[piece].nbytes:
                    self._use(start, start + length, piece)
                    del self._pieces[piece]
                    self.nbytes -= length

    def _grow(self, size: int) -> bool:
        """Allocate one more piece with room for so many bytes, if the limit and the machine allow it."""
        wanted = max(_power_of_two(size), _LEAST, min(_power_of_two_within(self.nbytes // _SHARE), _MOST))
        if self._limit is not None:
            wanted = min(wanted, _power_of_two_within(self._limit - self.nbytes))
        failure = ""
        while wanted >= size:
            try:
                piece = self._allocate(wanted)
            except RuntimeError as error:
                failure = str(error).partition("\n")[0]  # the error itself would hold this frame
                wanted //= 2
            else:
                self._pieces[piece.data_ptr()] = piece
                self.nbytes += wanted
                self._release(0, wanted, piece.data_ptr())
                return True
        if failure:
            self._limit = self.nbytes
            self._warn(failure)
        return False

    def _warn(self, failure: str) -> None:
        warn(
            f"From now on what finds no room in {show_bytes(self.nbytes)} of the host's memory stays on the device:"
            f" no more of it can be pinned ({failure})."
        )

    def _collect(self) -> None:
        """Put what was given back together with what is free beside it."""
        while self._returned:
            buffer = self._returned.popleft()
            piece, start = buffer.untyped_storage().data_ptr(), int(buffer.storage_offset())
            end = start + _round_up(buffer.nbytes)
            before, after = self._ends.get((piece, start)), self._starts.get((piece, end))
            if before is not None:
                self._use(before, start, piece)
            if after is not None:
                self._use(end, after, piece)
            self._release(start if before is None else before, end if after is None else after, piece)

    def _release(self, start: int, end: int, piece: int) -> None:
        """Record that these bytes of a piece are free, and none beside them."""
        insort(self._free, (end - start, piece, start))
        self._starts[piece, start] = end
        self._ends[piece, end] = start

    def _use(self, start: int, end: int, piece: int) -> None:
        """Take these bytes of a piece, which are free as a whole."""
        del self._free[bisect_left(self._free, (end - start, piece, start))]
        del self._starts[piece, start], self._ends[piece, end]


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _UNIT) * _UNIT


def _power_of_two(nbytes: int) -> int:
    """Round up to a power of two."""
    return 1 << (nbytes - 1).bit_length()


def _power_of_two_within(nbytes: int) -> int:
    """Round down to a power of two, at least 1."""
    return 1 << max(nbytes, 1).bit_length() - 1


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
        """Record that it is asked for; what is packed next begins another pass."""
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


class Cpu(UsedPolicy):
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
        super().__init__()
        self.window = window
        self.limit = limit
        self.min_bytes = min_bytes
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

    def release(self) -> None:
        """Give pinned memory back to torch, as soon as nothing is packed in it.

        Torch keeps it for the next one who asks; ``torch.accelerator.empty_host_cache()`` frees it.
        """
        for offloader in self._offloaders.values():
            offloader.pool.clear()
        self._offloaders.clear()
