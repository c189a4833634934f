"""Copies between a CUDA device and the host, on streams of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CudaCopy:
    """A copy that was asked for.

    Attributes:
        done: recorded after it.
        home: the computing stream at that time, to whose memory the device's side of the copy belongs.
        values: what is filled by a copy in; None for a copy out, which must not hold what it copies.
    """

    done: torch.cuda.Event
    home: torch.cuda.Stream
    values: Tensor | None = None


class CudaCopies:
    """Make copies on a stream for each direction, so that the two copy engines of the device work at once.

    Copies of what is asked for now run on a third stream, and wait for no more than the copy that is in flight: on the
    same stream they would come after all that was fetched ahead.

    Memory that comes back is allocated on the computing stream, which uses and frees it; an event before the copy keeps
    it from overwriting what that stream still reads there. So no ``record_stream`` is needed, and memory is freed at a
    place of the program, not at a moment. Only where a program computes on several streams, one of them may ask for
    what was allocated on another, and the allocator is notified of that.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)
        self._in_at_once = torch.cuda.Stream(device)
        self._home: torch.cuda.Stream | None = None
        self._has_several = False

    def allocate(self, nbytes: int) -> Tensor:
        """Allocate pinned memory. Torch keeps what others gave back, in sizes that may be of no use; that goes first.

        Raises:
            RuntimeError: there is no more of it.
        """
        try:
            return _pin(nbytes)
        except RuntimeError:
            empty_cache = getattr(torch.accelerator, "empty_host_cache", None)  # older torch has none
            if empty_cache is None:
                raise
            empty_cache()
            return _pin(nbytes)

    def copy_out(self, values: Tensor, buffer: Tensor) -> CudaCopy:
        """Begin when the computing stream has come this far.

        It has waited for the last copy from the buffer, which was free; another computing stream need not have.
        """
        home = self._find_home()
        self._out.wait_stream(home)
        if self._has_several:
            self._out.wait_stream(self._in)
            self._out.wait_stream(self._in_at_once)
        with torch.cuda.stream(self._out):
            buffer.copy_(values.view(torch.uint8), non_blocking=True)
        return CudaCopy(self._out.record_event(), home)

    def copy_in(
        self, buffer: Tensor, like: Tensor, numel: int, out: CudaCopy, *, is_urgent: bool
    ) -> tuple[Tensor, CudaCopy]:
        """Begin when the computing stream no longer uses what lay in the new memory, and the copy out is done."""
        values = torch.empty(numel, dtype=like.dtype, device=like.device)
        home, stream = self._find_home(), self._in_at_once if is_urgent else self._in
        stream.wait_stream(home)
        stream.wait_event(out.done)
        with torch.cuda.stream(stream):
            values.view(torch.uint8).copy_(buffer, non_blocking=True)
        return values, CudaCopy(stream.record_event(), home, values)

    def wait(self, ticket: CudaCopy) -> None:
        """The computing stream waits, and so does the one whose memory it is."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(ticket.done)
        if current != ticket.home:
            ticket.home.wait_event(ticket.done)
            if ticket.values is not None:
                ticket.values.record_stream(current)

    def _find_home(self) -> torch.cuda.Stream:
        """The computing stream."""
        home = torch.cuda.current_stream(self._device)
        if self._home is None:
            self._home = home
        elif home != self._home:
            self._has_several = True
        return home


def _pin(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)  # whatever the default device is
