"""``retrograd run --inventory``: an inventory beside what is recorded. Loaded where it was asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TextIO

from retrograd.inventory.inventory import Inventory
from retrograd.launch.closing import is_speaker, say
from retrograd.launch.pass_inventory import PassInventory
from retrograd.launch.requests import RunRequest
from retrograd.runs.layout import INVENTORY

AddFile = Callable[[str, Callable[[BinaryIO], None]], None]


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
        if not self._is_kept and is_speaker() and not any(self._run.glob(f"rank*/{INVENTORY}")):
            say(f"no inventory was taken: {self._tell_obstacle()}")

    def _tell_done(self) -> str:
        return ""

    def _show(self, file: TextIO) -> None:
        """Print nothing: the report shows it."""
