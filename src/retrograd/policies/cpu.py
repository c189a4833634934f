"""Saved tensors of a CUDA device wait in memory of the host."""

from __future__ import annotations

import threading

import torch

from retrograd.policies.cuda_copies import CudaCopies
from retrograd.policies.offloading import Offloader
from retrograd.policies.policy import Packed, Policy, Saved

_WINDOW = 512 << 20


class Cpu(Policy):
    """What a CUDA device saves is copied to pinned host memory, and back before it is needed; the CPU's own stays.

    Copies run on two streams beside the computation. Pinned memory is used again from step to step; the order in which
    the last backward pass asked is the order in which things are brought back. What it asked for first does not leave.
    While a CUDA graph is captured everything stays: the graph would repeat the copies into memory that is no longer
    there. Where the host has no more memory to pin, the rest stays, with one warning.

    Args:
        window: bytes of copies under way in each direction; so much of what was saved is on the device at any time.
        limit: bytes of host memory, at most; what finds no room there stays on the device.
        min_bytes: smaller stretches of memory stay.
    """

    def __init__(
        self, *, window: int = _WINDOW, limit: int | None = None, min_bytes: int = 16 * Policy.min_bytes
    ) -> None:
        self.window = window
        self.limit = limit
        self.min_bytes = min_bytes
        self._users = 0
        self._offloaders: dict[torch.device, Offloader] = {}
        self._starting = threading.Lock()

    def pack(self, saved: Saved) -> Packed | None:
        """Begin to copy it out."""
        values = saved.values
        if not values.is_cuda or torch.cuda.is_current_stream_capturing():
            return None
        with self._starting:
            offloader = self._offloaders.get(values.device)
            if offloader is None:
                offloader = Offloader(CudaCopies(values.device), self.window, self.limit)
                self._offloaders[values.device] = offloader
        return offloader.add(values)

    def open(self) -> None:
        """One more uses it."""
        self._users += 1

    def close(self) -> None:
        """One less does; with the last one torch gets pinned memory back, as soon as nothing is packed in it.

        Torch keeps it for the next one who asks; ``torch.accelerator.empty_host_cache()`` frees it.
        """
        self._users -= 1
        if not self._users:
            for offloader in self._offloaders.values():
                offloader.pool.clear()
            self._offloaders.clear()
