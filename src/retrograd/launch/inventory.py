"""The inventory of one step of a process. Loaded by the bootstrap."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import warnings
from pathlib import Path

from torch import Tensor

from retrograd.errors import RetrogradError, RetrogradWarning
from retrograd.hooks.backward import listen_to_backward, unlisten_to_backward
from retrograd.launch.closing import say, say_end
from retrograd.launch.inventory_request import InventoryRequest, read_inventory_request
from retrograd.runs.layout import UNFINISHED
from retrograd.runs.ranks import RankClaim, ask_rank
from retrograd.saved.inventory import Inventory
from retrograd.saved.taking import InventoryTaking, take_inventory
from retrograd.views.inventory_page import write_inventory
from retrograd.views.inventory_table import By, print_inventory

PARQUET = "inventory.parquet"
PAGE = "inventory.html"


def start_inventory_session() -> None:
    """Take an inventory of this process as ``retrograd inventory`` was asked to."""
    warnings.simplefilter("default", RetrogradWarning)  # also under -W error: ours must not raise in the script
    session = InventorySession(read_inventory_request(os.environ))
    atexit.register(session.close)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=session.start_over)
    session.start()


class InventorySession:
    """Counts backward passes, and listens from the end of the one before to the end of the one that was asked for."""

    def __init__(self, request: InventoryRequest) -> None:
        self._request = request
        self._lock = threading.RLock()
        self._taking: InventoryTaking | None = None

    def start(self) -> None:
        """Count the passes of the process."""
        self._ended = 0
        self._inventory: Inventory | None = None
        self._claim: RankClaim | None = None
        self._obstacle = ""
        self._closed = False
        if self._request.step == 0:
            self._begin()
        if multiprocessing.parent_process() is not None:  # a child of multiprocessing ends without atexit
            multiprocessing.util.Finalize(None, self.close, exitpriority=0)
        listen_to_backward(self)  # after the inventory has begun to follow passes, so that it knows of one first

    def start_over(self) -> None:
        """Count those of a forked child for itself: what its parent has seen is the parent's."""
        self._lock = threading.RLock()
        self._stop()
        self.start()

    def backward_begins(self, roots: tuple[Tensor, ...]) -> None:
        """An outermost pass is about to run."""

    def backward_ends(self, failed: bool) -> None:
        """It has ended, and the inventory knows it."""
        try:
            with self._lock:
                self._count()
        except Exception as error:  # a fault of ours must not stop the script
            self._give_up(error)

    def _count(self) -> None:
        number = self._ended
        self._ended += 1
        if number == self._request.step and self._taking is not None:
            unlisten_to_backward(self)
            self._taking.at_next_call(self._end_safely)  # while backward() runs, torch keeps our function modes
        elif self._ended == self._request.step:
            self._begin()

    def _end_safely(self) -> None:
        try:
            with self._lock:
                self._end()
        except Exception as error:  # a fault of ours must not stop the script
            self._give_up(error)

    def _begin(self) -> None:
        self._taking = take_inventory(timed=self._request.timed)
        self._inventory = self._taking.__enter__()

    def _end(self) -> None:
        """End the inventory and write it down."""
        taking, self._taking = self._taking, None
        if taking is None or self._inventory is None:
            return
        taking.__exit__(None, None, None)
        self._claim = RankClaim(Path(self._request.path), join=True)
        folder = self._claim.folder
        self._inventory.save(folder / (UNFINISHED + PARQUET)).replace(folder / PARQUET)
        write_inventory(self._inventory, folder / (UNFINISHED + PAGE)).replace(folder / PAGE)

    def _give_up(self, error: Exception) -> None:
        self._stop()
        if not self._obstacle:
            self._obstacle = error.problem if isinstance(error, RetrogradError) else f"the inventory failed: {error!r}"
            say(self._obstacle)

    def _stop(self) -> None:
        unlisten_to_backward(self)
        taking, self._taking = self._taking, None
        if taking is not None:
            taking.__exit__(None, None, None)

    def close(self) -> None:
        """Show it and say so, once."""
        if self._closed:
            return
        self._closed = True
        if self._ended > self._request.step:
            self._end_safely()
        self._stop()
        done = self._claim is not None and self._inventory is not None
        if self._claim is not None:
            self._claim.release()
        if done:
            self._print_table()
        count = len(self._inventory) if self._inventory is not None else 0
        say_end(self._tell_obstacle(), f"an inventory of {count:,} saved tensors" if done else "")

    def _print_table(self) -> None:
        if self._claim is None or self._claim.is_extra or ask_rank():
            return
        if self._inventory is None or sys.__stderr__ is None:
            return
        by: By = self._request.by  # type: ignore[assignment]
        with contextlib.suppress(OSError, ValueError):  # nobody listens, or the script has closed it
            print_inventory(self._inventory, by=by, file=sys.__stderr__)

    def _tell_obstacle(self) -> str:
        if self._obstacle:
            return self._obstacle
        if self._ended:
            return f"{self._ended} backward passes ran, and --step {self._request.step} counts from 0"
        return "no backward pass was seen"
