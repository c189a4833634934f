"""Memory of any device, to be fetched into memory of the CPU by another thread than the one that computes."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """Values as they are when this object is made, however far the device has come by then.

    Attributes:
        values: where they are.
    """

    __slots__ = ("_is_ready", "values")

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._is_ready: torch.cuda.Event | None = None
        if values.is_cuda:
            self._is_ready = torch.cuda.Event()
            self._is_ready.record(torch.cuda.current_stream(values.device))

    def fetch(self) -> Tensor:
        """The values in memory of the CPU; this thread waits for the copy, and the computing stream does not."""
        if self._is_ready is None:
            return self.values
        with torch.cuda.stream(torch.cuda.Stream(self.values.device)):
            self._is_ready.wait()
            return self.values.cpu()
