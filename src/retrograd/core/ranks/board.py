"""Notes that the processes of a program leave each other, in the store by which torch.distributed has them meet."""

from __future__ import annotations

import os
import socket
from contextlib import closing
from typing import Any

import torch

from retrograd.core.ranks.processes import count_processes, is_connected

_PORT = 9
"""Nothing is sent to it."""


class Board:
    """A board for notes. Nothing here waits for another process.

    Args:
        store: torch's store.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def post(self, key: str, text: str) -> None:
        """Leave a note; a later one of the same key replaces it.

        Raises:
            RuntimeError: the process that keeps the notes is gone.
        """
        self._store.set(f"retrograd/{key}", text)

    def look(self, key: str) -> str | None:
        """The note of this key; None where there is none.

        Raises:
            RuntimeError: the process that keeps the notes is gone.
        """
        key = f"retrograd/{key}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    @property
    def own_address(self) -> str:
        """The address of this machine on the network by which the processes have met."""
        host = _find_host(self._store)
        if host is None:
            return "127.0.0.1"
        for family, _, _, _, address in socket.getaddrinfo(host, _PORT, type=socket.SOCK_DGRAM):
            with closing(socket.socket(family, socket.SOCK_DGRAM)) as unused:
                unused.connect(address)  # a datagram socket sends nothing, and now knows its own end
                return str(unused.getsockname()[0])
        return "127.0.0.1"


def expect_processes() -> int:
    """In how many processes the program runs; before they have met, what the launcher says."""
    text = os.environ.get("WORLD_SIZE", "")
    return max(count_processes(), int(text) if text.isdecimal() and not is_connected() else 1)


def find_board() -> Board | None:
    """The board of this program; None where its processes have not met, or no more."""
    if not is_connected():
        return None
    find_store = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    try:
        return None if find_store is None else Board(find_store())
    except (RuntimeError, ValueError):
        return None


def _find_host(store: Any) -> str | None:
    """The machine that keeps the notes; None for a store that is a file or in memory."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)
