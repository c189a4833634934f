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
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from retrograd.core.foreign.text import check_kinds, parse_object
from retrograd.core.merging.messages import Frames, Message, pack

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
        told: what it is to know of us besides.

    Attributes:
        welcome: what it has told us.

    Raises:
        OSError: nobody is there, or nobody who knows us.
    """

    def __init__(self, address: str, rank: int, **told: Any) -> None:
        hello = told
        try:
            told = parse_object(address)
            check_kinds(told, {"host": str, "port": int, "token": str})
            where = told["host"], told["port"]
        except (ValueError, KeyError) as error:
            raise OSError(f"there is no address in {address[:60]!r}") from error
        self.socket = socket.create_connection(where, timeout=CONNECT_SECONDS)
        try:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket.sendall(pack("hello", rank=rank, token=told["token"], **hello))
            self._frames = Frames()
            self.welcome = self._await_welcome()
            self.socket.settimeout(SEND_SECONDS)
        except (OSError, ValueError) as error:
            self.close()
            raise OSError(f"nobody is there who knows us: {error}") from error

    def _await_welcome(self) -> dict[str, Any]:
        while received := self.socket.recv(_CHUNK):
            for head, _ in self._frames.add(received):
                if head["kind"] == "welcome":
                    return head
        raise OSError("who is there does not know us")

    def send(self, frame: bytes) -> None:
        """Send a frame.

        Raises:
            OSError: the other one is gone, or takes nothing.
        """
        self.socket.sendall(frame)

    def receive(self) -> list[dict[str, Any]]:
        """What the other one has said since, without waiting.

        Raises:
            OSError: it has hung up.
            ValueError: it is none of ours.
        """
        found = [head for head, _ in self._frames.add(b"")]  # what came with the welcome
        self.socket.settimeout(0.0)
        try:
            while received := self.socket.recv(_CHUNK):
                found += [head for head, _ in self._frames.add(received)]
        except BlockingIOError:
            return found
        finally:
            self.socket.settimeout(SEND_SECONDS)
        raise OSError("the other one has hung up")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()


class Peer:
    """A rank that hands us its rows.

    Attributes:
        rank: its number; −1 until it has proven that it is one.
        codes: by its code of a site, ours.
        address: where it listens itself.
        through: all rows of earlier steps than this one have come.
        done_at: when it has said that no more of its rows are to come; infinite until then.
        is_urgent: a rank behind it waits to end until its rows are written.
        demand: the number of what was last asked of it; what it sent before it knew is not taken.
        heard_of: ranks whose units have come through it.
        told: what it was last told to be written.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.frames = Frames()
        self.rank = -1
        self.address = ""
        self.codes = np.zeros(0, np.int64)
        self.through = 0
        self.done_at = float("inf")
        self.is_urgent = False
        self.demand = 0
        self.heard_of: set[int] = set()
        self.told: object = None
        self.heard = time.monotonic()
        self._unsent = b""

    @property
    def is_done(self) -> bool:
        """Tell whether no more of its rows are to come."""
        return self.done_at < float("inf")

    def say(self, kind: str, **head: Any) -> None:
        """Send a message, as much of it as the other one takes by now."""
        self._unsent += pack(kind, **head)
        self.send()

    def send(self) -> None:
        """Send more of what was to be said; that it fails is seen when it is read from."""
        with contextlib.suppress(OSError):
            while self._unsent:
                self._unsent = self._unsent[self.connection.send(self._unsent) :]


class Door:
    """Where ranks connect that hand us their rows.

    Args:
        host: the address to listen at.
        ranks: who may come; where nobody may, nothing is listened at.
        greet: called with who has come, and what it says of itself.

    Raises:
        OSError: it cannot be listened at.
    """

    def __init__(self, host: str, ranks: range, greet: Callable[[Peer, dict[str, Any]], None]) -> None:
        self._ranks = ranks
        self._welcome = greet
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
        for peer in self.peers:
            peer.send()
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
        check_kinds({"rank": None, "token": None, "door": None, **head}, {"rank": int, "token": str, "door": str})
        if not hmac.compare_digest(head["token"].encode(), self._token.encode()) or head["rank"] not in self._ranks:
            raise ValueError("a stranger")
        peer.rank, peer.address = head["rank"], head["door"]
        self._welcome(peer, head)

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
