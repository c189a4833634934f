"""The way out of the memory of one device, for all that a budget leaves no room for."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Protocol

import torch

from retrograd.budget.backends import Carrier, DiskCarrier, HostCarrier, Load
from retrograd.budget.link_speed import measure_link
from retrograd.budget.simulation import Link
from retrograd.policies.in_flight import UnderWay
from retrograd.policies.policy import Saved


class Leaving(Protocol):
    """A stretch of memory that is being copied out."""

    def leave(self) -> None:
        """The memory is freed as soon as nobody else holds it."""


class Outlet:
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
        self._folder = None if folder is None else Path(folder).absolute()
        self._carrier: Carrier | None = None
        self._link: Link | None = None
        self._under_way: UnderWay[weakref.ref[Leaving]] = UnderWay()

    def turn_to(self, device: torch.device) -> bool:
        """Serve this device from now on, if it is the first, or a CUDA device after the CPU; whether it does."""
        before = self.device
        is_better = before is not None and before.type == "cpu" and device.type == "cuda" and self._carrier is None
        if before is None or is_better:
            self.device = device
        return self.device == device

    def carry_out(self, saved: Saved, window: int) -> Load | None:
        """Begin to copy a stretch out; None: it has to stay.

        Args:
            saved: the stretch.
            window: bytes that may be under way.
        """
        return self._open(window).carry_out(saved)

    def finish(self) -> None:
        """Wait until all copies out are done."""
        if self._carrier is not None:
            self._carrier.finish()

    def see_off(self, item: Leaving, nbytes: int, window: int) -> None:
        """It was carried out. What left first is freed when more than the window follows it."""
        self._free(self._under_way.add(weakref.ref(item), nbytes, window))

    def see_off_all(self) -> None:
        """Free all that is on its way."""
        self._free(self._under_way.drain())

    def measure(self, window: int) -> Link:
        """How fast it is; measured once. It holds no memory for later then."""
        carrier = self._open(window)
        if self._link is None:
            assert self.device is not None
            self._link = measure_link(carrier, self.device)
        carrier.trim()
        return self._link

    def close(self) -> None:
        """End threads. What is elsewhere still comes back, and the next that leaves begins anew."""
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            carrier.close()

    def _open(self, window: int) -> Carrier:
        if self._carrier is None:
            assert self.device is not None
            is_cuda = self.device.type == "cuda"
            self._carrier = HostCarrier(self.device) if is_cuda else DiskCarrier(self._folder, window)
            self.destination = self._carrier.destination
        return self._carrier

    @staticmethod
    def _free(references: list[weakref.ref[Leaving]]) -> None:
        for reference in references:
            if (item := reference()) is not None:
                item.leave()
