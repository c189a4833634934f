"""Copies between a CUDA device and the host, on streams of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from retrograd.saved.offloading import CopyEngine


class CudaCopies(CopyEngine):
    """One stream for each direction, so that the two copy engines of the device work at once.

    Memory that comes back is allocated on the computing stream, which alone uses and frees it; an event before the copy
    keeps it from overwriting what that stream still reads there. So no ``record_stream`` is needed, and memory is freed
    at a place of the program, not at a moment.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)
        self._last_use: dict[int, torch.cuda.Event] = {}

    def allocate(self, nbytes: int) -> Tensor:
        """Pinned memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy_out(self, values: Tensor, buffer: Tensor) -> torch.cuda.Event:
        """Begin when the computing stream has come this far, and the last copy from the buffer is done."""
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        last = self._last_use.get(buffer.data_ptr())
        if last is not None:
            self._out.wait_event(last)
        with torch.cuda.stream(self._out):
            buffer[: values.nbytes].copy_(values.view(torch.uint8), non_blocking=True)
        return self._use(buffer, self._out)

    def copy_in(self, buffer: Tensor, like: Tensor, numel: int) -> tuple[Tensor, torch.cuda.Event]:
        """Begin when the computing stream no longer uses what lay in the new memory, and the copy out is done."""
        values = torch.empty(numel, dtype=like.dtype, device=like.device)
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        self._in.wait_event(self._last_use[buffer.data_ptr()])
        with torch.cuda.stream(self._in):
            values.view(torch.uint8).copy_(buffer[: values.nbytes], non_blocking=True)
        return values, self._use(buffer, self._in)

    def wait(self, ticket: torch.cuda.Event) -> None:
        """The computing stream waits."""
        torch.cuda.current_stream(self._device).wait_event(ticket)

    def _use(self, buffer: Tensor, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Note the last copy from or to a buffer, which lives as long as the pool."""
        event = self._last_use[buffer.data_ptr()] = torch.cuda.Event()
        event.record(stream)
        return event
