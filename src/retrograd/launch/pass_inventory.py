"""The inventory of one backward pass of a process; what becomes of it, subclasses say."""

from __future__ import annotations

from abc import abstractmethod

from retrograd.hooks.backward import backward_listeners
from retrograd.inventory.inventory import Inventory
from retrograd.inventory.recorder import InventoryRecorder, take_inventory
from retrograd.launch.pass_session import PassSession


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
