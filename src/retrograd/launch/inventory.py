"""The inventory of one step of a process. Loaded by the bootstrap."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO

from retrograd.hooks.backward import unlisten_to_backward
from retrograd.launch.inventory_request import InventoryRequest, read_inventory_request
from retrograd.launch.pass_session import PassSession
from retrograd.runs.layout import UNFINISHED
from retrograd.runs.ranks import RankClaim
from retrograd.saved.inventory import Inventory
from retrograd.saved.taking import InventoryTaking, take_inventory
from retrograd.views.inventory_page import write_inventory
from retrograd.views.inventory_table import By, print_inventory

PARQUET = "inventory.parquet"
PAGE = "inventory.html"


def start_inventory_session() -> None:
    """Take an inventory of this process as ``retrograd inventory`` was asked to."""
    InventorySession(read_inventory_request(os.environ)).follow_process()


class InventorySession(PassSession):
    """Listens from the end of the pass before to the end of the one that was asked for."""

    def __init__(self, request: InventoryRequest) -> None:
        super().__init__("the inventory", f"--step {request.step} counts from 0")
        self._request = request
        self._taking: InventoryTaking | None = None

    def _start(self) -> None:
        self._inventory: Inventory | None = None
        if self._request.step == 0:
            self._begin()

    def _count(self, failed: bool) -> None:
        number = self._ended
        self._ended += 1
        if number == self._request.step and self._taking is not None:
            unlisten_to_backward(self)
            # while backward() runs, torch keeps our function modes
            self._taking.at_next_call(lambda: self._run_safely(self._end))
        elif self._ended == self._request.step:
            self._begin()

    def _begin(self) -> None:
        self._taking = take_inventory(timed=self._request.timed)
        self._inventory = self._taking.__enter__()

    def _end(self) -> None:
        """End the inventory and write it down, if the pass was made."""
        if self._ended <= self._request.step or self._taking is None or self._inventory is None:
            return
        taking, self._taking = self._taking, None
        taking.__exit__(None, None, None)
        self._claim = RankClaim(Path(self._request.path), join=True)
        folder = self._claim.folder
        self._inventory.save(folder / (UNFINISHED + PARQUET)).replace(folder / PARQUET)
        write_inventory(self._inventory, folder / (UNFINISHED + PAGE)).replace(folder / PAGE)

    def _stop(self) -> None:
        super()._stop()
        taking, self._taking = self._taking, None
        if taking is not None:
            taking.__exit__(None, None, None)

    def _tell_done(self) -> str:
        if self._claim is None or self._inventory is None:
            return ""
        return f"an inventory of {len(self._inventory):,} saved tensors"

    def _show(self, file: TextIO) -> None:
        by: By = self._request.by  # type: ignore[assignment]
        if self._inventory is not None:
            print_inventory(self._inventory, by=by, file=file)
