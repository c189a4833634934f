"""The inventory of one backward pass of a process: of ``retrograd inventory``, and of ``retrograd run --inventory``.

Loaded by the bootstrap, or beside a recording where one was asked for.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TextIO

from retrograd.core.hooks.backward import backward_listeners
from retrograd.core.launch.closing import is_reporting_process
from retrograd.core.launch.pass_session import PassSession
from retrograd.core.launch.requests import RunRequest
from retrograd.core.notices import say
from retrograd.core.runs.layout import INVENTORY
from retrograd.core.runs.ranks import RankClaim
from retrograd.memory.inventory.inventory import Inventory
from retrograd.memory.inventory.recorder import InventoryRecorder, take_inventory
from retrograd.memory.launch.requests import InventoryRequest
from retrograd.memory.views.inventory_page import write_inventory

PAGE = "inventory.html"

AddFile = Callable[[str, Callable[[BinaryIO], None]], None]
"""Given a name, and what writes a file, adds that file to the run folder."""


class PassInventory(PassSession):
    """Listens from the end of the pass before to the end of the one that was asked for.

    Args:
        wanted: which pass, counted from 0.
        option: by which it was asked for.
        timed: whether to measure how long operations take.
    """

    def __init__(self, wanted: int, option: str, *, timed: bool) -> None:
        super().__init__("the inventory", f"{option} {wanted} counts from 0")
        self._wanted = wanted
        self._timed = timed
        self._recorder: InventoryRecorder | None = None
        self._inventory: Inventory | None = None

    def _start(self) -> None:
        self._inventory = None
        if self._wanted == 0:
            self._begin()

    def _count(self, failed: bool) -> None:
        number = self._ended
        self._ended += 1
        if number == self._wanted and self._recorder is not None:
            backward_listeners.remove(self)
            # while backward() runs, torch keeps our function modes
            self._recorder.at_next_call(lambda: self._run_safely(self._end))
        elif self._ended == self._wanted:
            self._begin()

    def _begin(self) -> None:
        self._recorder = take_inventory(timed=self._timed)
        self._inventory = self._recorder.__enter__()

    def _end(self) -> None:
        """End the inventory, and keep it if the pass was made."""
        if self._ended <= self._wanted or self._recorder is None or self._inventory is None:
            return
        taking, self._recorder = self._recorder, None
        taking.__exit__(None, None, None)
        self._keep(self._inventory)

    @abstractmethod
    def _keep(self, inventory: Inventory) -> None:
        """Write it down."""

    def _stop(self) -> None:
        super()._stop()
        taking, self._recorder = self._recorder, None
        if taking is not None:
            taking.__exit__(None, None, None)


def start_inventory_session() -> None:
    """Take an inventory of this process as ``retrograd inventory`` was asked to."""
    InventorySession(InventoryRequest.read(os.environ)).follow_process()


class InventorySession(PassInventory):
    """Writes the inventory to a folder of this process's own, and prints it in the end."""

    def __init__(self, request: InventoryRequest) -> None:
        super().__init__(request.number, "--pass", timed=request.timed)
        self._request = request

    def _keep(self, inventory: Inventory) -> None:
        self._claim = RankClaim(Path(self._request.path), join=True)
        folder = self._claim.folder
        inventory.save(folder / INVENTORY)
        write_inventory(inventory, folder / PAGE)

    def _tell_done(self) -> str:
        if self._claim is None or self._inventory is None:
            return ""
        return f"the saved tensors of backward pass {self._request.number}"

    def _show(self, file: TextIO) -> None:
        from retrograd.memory.views.inventory_table import print_inventory

        if self._inventory is not None:
            print_inventory(self._inventory, by=self._request.by, file=file)


class RunInventory(PassInventory):
    """Hands the inventory to what writes the run folder.

    Args:
        request: what was asked for, an inventory among it.
        add_file: given a name, and what writes that file.
    """

    def __init__(self, request: RunRequest, add_file: AddFile) -> None:
        assert request.inventory is not None
        super().__init__(request.inventory, "--inventory", timed=False)
        self._run = Path(request.path)
        self._add_file = add_file
        self._is_kept = False

    def _start(self) -> None:
        self._is_kept = False
        super()._start()

    def _keep(self, inventory: Inventory) -> None:
        self._is_kept = True
        self._add_file(INVENTORY, inventory.write)

    def _say_end(self) -> None:
        """The end is the recording's to tell; here only that there is no inventory in it."""
        if not self._is_kept and is_reporting_process() and not any(self._run.glob(f"rank*/{INVENTORY}")):
            say(f"no inventory was taken: {self._tell_obstacle()}")

    def _tell_done(self) -> str:
        return ""

    def _show(self, file: TextIO) -> None:
        """Print nothing: the report shows it."""
