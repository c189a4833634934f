"""Connections between ranks: one to whom rows are handed, some from those who hand theirs over.

Who may connect proves it with a token, which is on the board where only the processes of the program look. Nobody waits
for another one for long: a rank that dies is a connection that ends, one that hangs a connection that is silent.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from retrograd.foreign.text import check_kinds, parse_object
from retrograd.merging.messages import Frames, Message, pack

CONNECT_SECONDS = 5.0
SEND_SECONDS = 20.0
SILENT_SECONDS = 90.0
"""A rank of which nothing is heard for so long is taken to be gone."""
_CHUNK = 1 << 20
_MOST_STRANGERS = 64
"""Connections at a time that have not proven who they are."""


class NoteBoard(Protocol):
    """Where ranks leave each other their addresses."""

    def post(self, key: str, text: str) -> None:
        """Leave a note."""

    def look(self, key: str) -> str | None:
        """The note of this key, if there is one."""

    @property
    def own_address(self) -> str:
        """The address of this machine."""


class RankLink:
    """The connection to the rank that takes our rows.

    Args:
        address: of that rank, as it is on the board.
        rank: our own.

    Raises:
        OSError: nobody is there, or nobody who knows us.
    """

    def __init__(self, address: str, rank: int) -> None:
        try:
            told = parse_object(address)
            check_kinds(told, {"host": str, "port": int, "token": str})
            where = told["host"], told["port"]
        except (ValueError, KeyError) as error:
            raise OSError(f"there is no address in {address[:60]!r}") from error
        self.socket = socket.create_connection(where, timeout=CONNECT_SECONDS)
        try:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket.sendall(pack("hello", rank=rank, token=told["token"]))
            is_welcome = next(self.receive(), ({}, b""))[0].get("kind") == "welcome"
            self.socket.settimeout(SEND_SECONDS)
        except (OSError, ValueError) as error:
            self.close()
            raise OSError(f"nobody is there who knows us: {error}") from error
        if not is_welcome:
            self.close()
            raise OSError("who is there does not know us")

    def send(self, frame: bytes) -> None:
        """Send a frame.

        Raises:
            OSError: the other one is gone, or takes nothing.
        """
        self.socket.sendall(frame)

    def receive(self) -> Iterator[Message]:
        """Wait for a message, but not for long; nothing where the other one has hung up."""
        frames = Frames()
        while received := self.socket.recv(_CHUNK):
            yield from frames.add(received)

    def is_gone(self) -> bool:
        """Tell whether the other one has hung up; it says nothing unasked."""
        self.socket.settimeout(0.0)
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self.socket.settimeout(SEND_SECONDS)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()


class Peer:
    """A rank that hands us its rows.

    Attributes:
        rank: its number; −1 until it has proven that it is one.
        codes: by its code of a site, ours.
        through: all rows of earlier steps than this one have come.
        is_done: it has said goodbye.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.frames = Frames()
        self.rank = -1
        self.codes = np.zeros(0, np.int64)
        self.through = 0
        self.is_done = False
        self.heard = time.monotonic()

    def answer(self, kind: str) -> None:
        """Send a short message; that it fails is seen when it is read from."""
        with contextlib.suppress(OSError):
            self.connection.send(pack(kind))


class Door:
    """Where ranks connect that hand us their rows.

    Args:
        host: the address to listen at.
        ranks: who may come; where nobody may, nothing is listened at.

    Raises:
        OSError: it cannot be listened at.
    """

    def __init__(self, host: str, ranks: range) -> None:
        self._ranks = ranks
        self._token = secrets.token_hex(16)
        self._selector = selectors.DefaultSelector()
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._listener: socket.socket | None = None
        self.address = ""
        self.peers: list[Peer] = []
        if ranks:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, 0), family=family)
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ)
            port = self._listener.getsockname()[1]
            self.address = json.dumps({"host": host, "port": port, "token": self._token})

    def ring(self) -> None:
        """Have :meth:`receive` return at once, from any thread."""
        with contextlib.suppress(OSError):  # it is about to anyway, or closed
            self._rope.send(b"!")

    def receive(self, seconds: float) -> Iterator[tuple[Peer, Message | None]]:
        """Wait so long for messages; None from one that is gone."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._bell:
                self._bell.recv(_CHUNK)
            elif key.fileobj is self._listener:
                self._admit(self._listener)
            else:
                yield from self._read(key.data)
        for peer in [each for each in self.peers if time.monotonic() - each.heard > SILENT_SECONDS]:
            yield from self._drop(peer)

    def _admit(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            connection.setblocking(False)
            strangers = [peer for peer in self.peers if peer.rank < 0]
            if len(strangers) >= _MOST_STRANGERS:
                connection.close()
                return
            peer = Peer(connection)
            self.peers.append(peer)
            self._selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, peer: Peer) -> Iterator[tuple[Peer, Message | None]]:
        try:
            received = peer.connection.recv(_CHUNK)
            peer.heard = time.monotonic()
            for message in peer.frames.add(received):
                if peer.rank < 0:
                    self._greet(peer, message[0])
                elif peer in self.peers:  # and not dropped for what it has said
                    yield peer, message
        except BlockingIOError:
            return
        except (OSError, ValueError):  # it has died, or is none of ours
            received = b""
        if not received:
            yield from self._drop(peer)

    def _greet(self, peer: Peer, head: dict[str, Any]) -> None:
        """Let in who has the token.

        Raises:
            ValueError: it has another one.
        """
        check_kinds({"rank": None, "token": None, **head}, {"rank": int, "token": str})
        if not hmac.compare_digest(head["token"].encode(), self._token.encode()) or head["rank"] not in self._ranks:
            raise ValueError("a stranger")
        peer.rank = head["rank"]
        peer.answer("welcome")

    def _drop(self, peer: Peer) -> Iterator[tuple[Peer, None]]:
        self.drop(peer)
        if peer.rank >= 0:
            yield peer, None

    def drop(self, peer: Peer) -> None:
        """Hang up."""
        if peer in self.peers:
            self.peers.remove(peer)
            with contextlib.suppress(OSError, KeyError, ValueError):
                self._selector.unregister(peer.connection)
            peer.connection.close()

    def close(self) -> None:
        for peer in list(self.peers):
            self.drop(peer)
        self._selector.close()
        for each in (self._listener, self._bell, self._rope):
            if each is not None:
                each.close()
