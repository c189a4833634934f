"""The offloader of a budget: takes memory of one device to a disk or to the host, and brings it back when told to."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from retrograd.core.addresses import local_folder
from retrograd.memory.budget.measuring import seconds_between, take_time
from retrograd.memory.budget.simulation import Link
from retrograd.memory.policies.cpu import HostOffloader, Offloaded
from retrograd.memory.policies.cuda_copies import CudaCopies
from retrograd.memory.policies.disk import Disk, Spilled
from retrograd.memory.policies.policy import Saved

Load = Spilled | Offloaded
"""A storage range that is elsewhere. Nothing is read ahead of it unasked, as the policies do."""


class DiskBackend:
    """Takes memory to a file.

    Args:
        folder: where the file is; None for the default of :class:`Disk`.
        window: bytes that may wait to be written.
    """

    destination = "disk"

    def __init__(self, folder: Path | None, window: int) -> None:
        self._disk = Disk(folder, max_waiting=window, min_bytes=0)
        self._disk.open()

    def copy_out(self, saved: Saved) -> Load | None:
        """Hand a range to the thread that writes, which waits while more than the window is to be written."""
        spilled = self._disk.pack(saved)
        return spilled if isinstance(spilled, Spilled) else None

    def finish(self) -> None:
        """Wait until all is written."""
        self._disk.flush()

    def trim(self) -> None:
        """Do nothing: nothing is held for later, the file is as long as it was, and parts of it are free."""

    def close(self) -> None:
        """End the threads. What is in the file still comes back."""
        self._disk.close()


class HostBackend:
    """Takes memory of a CUDA device to pinned memory of the host.

    Args:
        engine: makes the copies.
    """

    destination = "host"

    def __init__(self, engine: CudaCopies) -> None:
        self._offloader = HostOffloader(engine, 0)

    def copy_out(self, saved: Saved) -> Load | None:
        """Begin to copy a range; None where there is no room for it."""
        return self._offloader.copy_out(saved.values)

    def finish(self) -> None:
        """Do nothing: the device waits for a copy when what was copied leaves."""

    def trim(self) -> None:
        """Give back pinned memory that is free."""
        self._offloader.pool.clear()

    close = trim


class Offloader:
    """Takes what one device saves to a disk or to the host. There are threads and buffers only once they are needed.

    Args:
        folder: where the file of what leaves the CPU is; None for the default.

    Attributes:
        device: whose memory it is; None before anything was saved.
        destination: where to, in a word; empty before anything has left.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self.device: torch.device | None = None
        self.destination = ""
        self._folder = None if folder is None else local_folder(folder)
        self._backend: DiskBackend | HostBackend | None = None
        self._link: Link | None = None

    def turn_to(self, device: torch.device) -> bool:
        """Serve this device from now on, if it is the first, or a CUDA device after the CPU; whether it does."""
        before = self.device
        is_better = before is not None and before.type == "cpu" and device.type == "cuda" and self._backend is None
        if before is None or is_better:
            self.device = device
        return self.device == device

    def copy_out(self, saved: Saved, window: int) -> Load | None:
        """Begin to copy a range out; None: it has to stay.

        Args:
            saved: the range.
            window: bytes that may be in flight.
        """
        return self._open(window).copy_out(saved)

    def finish(self) -> None:
        """Wait until all copies out are done."""
        if self._backend is not None:
            self._backend.finish()

    def measure(self, window: int) -> Link:
        """Measure how fast it is, once. It holds no memory for later then."""
        backend = self._open(window)
        if self._link is None:
            assert self.device is not None
            self._link = measure_link(backend, self.device)
        backend.trim()
        return self._link

    def close(self) -> None:
        """End threads. What is elsewhere still comes back, and the next that leaves begins anew."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    def _open(self, window: int) -> DiskBackend | HostBackend:
        if self._backend is None:
            assert self.device is not None
            is_cuda = self.device.type == "cuda"
            self._backend = HostBackend(CudaCopies(self.device)) if is_cuda else DiskBackend(self._folder, window)
            self.destination = self._backend.destination
        return self._backend


_SAMPLE_BYTES = 4 << 20
_DEVICE_SAMPLE_BYTES = 32 << 20
"""4 MB go over a link in no more time than the program takes to ask for them."""
_SAMPLES = 4
_LATENCY = 50e-6
"""Seconds that the program spends on one range that is moved."""
_DEVICE_LATENCY = 5e-6
"""Seconds that a device waits for an event beyond when it takes place. It does not wait for the program."""


def measure_link(backend: DiskBackend | HostBackend, device: torch.device) -> Link:
    """Measure the speed of a backend in both directions, from a few ranges there and back, twice.

    The first time files grow, and memory is pinned; so the speed is that of the second. The work of other threads is
    that of the first: while a model trains, they never find the processor's caches as warm as the second time.
    """
    nbytes = _SAMPLE_BYTES if device.type == "cpu" else _DEVICE_SAMPLE_BYTES
    first = torch.arange(nbytes // 8, device=device).view(torch.uint8)  # no zeros, and no random numbers
    samples = [first.clone() for _ in range(_SAMPLES)]
    backend.finish()
    cold, warm = _go_there_and_back(backend, samples), _go_there_and_back(backend, samples)
    return replace(warm, work_out=max(cold.work_out, warm.work_out), work_back=max(cold.work_back, warm.work_back))


def _go_there_and_back(backend: DiskBackend | HostBackend, samples: list[Tensor]) -> Link:
    began, at_first = take_time(samples[0]), time.process_time()
    loads = [backend.copy_out(Saved(values, values.shape, "", 0)) for values in samples]
    for load in loads:
        if load is not None:
            load.leave()
    backend.finish()
    between, at_half = take_time(samples[0]), time.process_time()
    for load in loads:
        if load is not None:
            load.want()
            load.take()
    ended, at_last = take_time(samples[0]), time.process_time()
    nbytes = sum(sample.nbytes for sample in samples)
    out, back = max(seconds_between(began, between), 1e-6), max(seconds_between(between, ended), 1e-6)
    is_beside = samples[0].device.type != "cpu"  # others make the copies
    if is_beside:
        return Link(nbytes / out, nbytes / back, _DEVICE_LATENCY)
    work_out, work_back = at_half - at_first, at_last - at_half
    return Link(nbytes / out, nbytes / back, _LATENCY, work_out / nbytes, work_back / nbytes)
