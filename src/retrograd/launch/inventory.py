"""``retrograd inventory`` in one process. Loaded by the bootstrap."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO

from retrograd.inventory.inventory import Inventory
from retrograd.launch.pass_inventory import PassInventory
from retrograd.launch.requests import InventoryRequest
from retrograd.runs.layout import INVENTORY
from retrograd.runs.ranks import RankClaim
from retrograd.views.inventory_page import write_inventory

PAGE = "inventory.html"


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
        return f"an inventory of backward pass {self._request.number}"

    def _show(self, file: TextIO) -> None:
        from retrograd.views.inventory_table import print_inventory

        if self._inventory is not None:
            print_inventory(self._inventory, by=self._request.by, file=file)
