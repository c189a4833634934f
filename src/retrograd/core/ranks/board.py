"""What one of several processes says to the others, through the store by which they have found each other.

No collective: nothing is waited for but the store, which answers in a tenth of a millisecond on one machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Protocol

from retrograd.core.ranks.processes import ask_rank, has_other_processes


class Board(Protocol):
    """Where one process says what all of them do."""

    @property
    def is_led(self) -> bool:
        """True in the one process that says it."""

    def post(self, text: str) -> None:
        """Say something to all processes, this one too."""

    def read(self) -> Iterator[str]:
        """What has been said since the last time, in order."""


class StoreBoard:
    """A board in a store of ``torch.distributed``; the first process that comes leads.

    Args:
        store: the store.
        name: of the board, the same in all processes.

    Attributes:
        is_led: this process leads.
    """

    def __init__(self, store: Any, name: str) -> None:
        rank = str(ask_rank())
        self._store, self._name = store, name
        self._posted = self._read = 0
        self.is_led = bytes(store.compare_set(f"{name}/first", "", rank)).decode() == rank

    def post(self, text: str) -> None:
        """Say something to all processes, this one too; the one that leads alone does."""
        self._store.set(f"{self._name}/{self._posted}", text)
        self._posted += 1

    def read(self) -> Iterator[str]:
        """What has been said since the last time, in order."""
        while self._store.check([f"{self._name}/{self._read}"]):
            yield bytes(self._store.get(f"{self._name}/{self._read}")).decode()
            self._read += 1


def find_board(name: str) -> StoreBoard | None:
    """A board of the processes that have found each other.

    None where this is the only one, or where they have no store that answers: those of MPI have none, and a group that
    stands for others has one that holds nothing.
    """
    if not has_other_processes():
        return None
    try:
        return StoreBoard(sys.modules["torch.distributed.distributed_c10d"]._get_default_store(), name)
    except Exception:  # of any kind, for any library may make a store
        return None
