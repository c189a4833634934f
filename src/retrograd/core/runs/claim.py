"""A claim on a folder in object storage, where no lock dies with a process: an object that is written over and over.

It is made by a conditional put, where the store has one. Whoever finds it old takes the folder over. Two who do so at
the same moment may both believe that they have it, until the one that lost finds out with its next flush, before it
writes anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from retrograd.core.addresses import fetch, put
from retrograd.core.foreign.text import check_fields, parse_object

BEAT_SECONDS = 30.0
"""How often a claim is written again, at least, if the store can be reached."""
STALE_SECONDS = 4 * BEAT_SECONDS
"""A claim that has not been written for so long is that of a process that was killed."""
_PAUSE_SECONDS = 2.0

_ours: set[str] = set()
"""Nonces of the claims that this process holds."""


@dataclass(frozen=True)
class ClaimHolder:
    """The process that holds a folder, as its claim tells it.

    Attributes:
        nonce: a word that no other claim has.
        place: the machine, and the table of processes on it, in which ``pid`` counts.
        pid: number of the process.
        written: when this was written, in seconds since the epoch, by its clock.
        is_released: it has let go of the folder.
    """

    nonce: str
    place: str
    pid: int
    written: float
    is_released: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def is_alive(self) -> bool:
        """Whether it may still write."""
        return not self.is_released and time.time() - self.written < STALE_SECONDS and not self._is_gone

    @property
    def _is_gone(self) -> bool:
        if self.place != name_place():
            return False
        if self.pid == os.getpid():
            return self.nonce not in _ours
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False


class Claim:
    """A hold on a folder, of which others see that it goes on by the time it was last written.

    Args:
        path: the object.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pid = os.getpid()
        self._nonce = secrets.token_hex(12)
        self._beaten = 0.0

    def acquire(self, wait: float = 0.0) -> bool:
        """Try to take the folder; for ``wait`` seconds, unless its holder turns out to be alive.

        Raises:
            Exception: the store cannot be reached.
        """
        deadline = time.monotonic() + wait
        first = found = read_holder(self.path)
        while found is not None and found.is_alive:
            if time.monotonic() >= deadline or first != found:
                return False
            time.sleep(_PAUSE_SECONDS)
            found = read_holder(self.path)
        _ours.add(self._nonce)
        try:
            self._write(is_new=found is None)
        except FileExistsError:  # somebody was quicker
            _ours.discard(self._nonce)
            return False
        return True

    def is_of(self, path: Path) -> bool:
        """Tell whether the folder is still held; if so, others are told when it is time."""
        found = read_holder(path)
        if found is None or found.nonce != self._nonce:
            return False
        self.path = path
        if time.monotonic() - self._beaten >= BEAT_SECONDS / 2:
            self._write()
        return True

    def release(self) -> None:
        """Let go of the folder, if it is held; a forked child leaves its parent's hold alone."""
        if os.getpid() != self._pid or self._nonce not in _ours:
            return
        _ours.discard(self._nonce)
        with contextlib.suppress(Exception):  # out of reach, it grows old by itself
            found = read_holder(self.path)
            if found is not None and found.nonce == self._nonce:
                _write_holder(self.path, replace(found, is_released=True))

    def _write(self, *, is_new: bool = False) -> None:
        holder = ClaimHolder(self._nonce, name_place(), os.getpid(), time.time())
        try:
            _write_holder(self.path, holder, is_new=is_new)
        except FileExistsError:
            raise
        except (NotImplementedError, OSError):
            if not is_new:
                raise
            _write_holder(self.path, holder)  # the store knows no conditional put
        self._beaten = time.monotonic()


def read_holder(path: Path) -> ClaimHolder | None:
    """The holder that a claim tells of; None where there is none, or nobody can read it."""
    try:
        return ClaimHolder(**parse_object(fetch(path)))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def is_held(path: Path) -> bool:
    """Tell whether a process that seems to be alive holds this claim."""
    found = read_holder(path)
    return found is not None and found.is_alive


def _write_holder(path: Path, holder: ClaimHolder, *, is_new: bool = False) -> None:
    put(path, json.dumps(asdict(holder)).encode(), is_new=is_new)


def name_place() -> str:
    """The machine, and the table of processes on it."""
    try:
        table = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116  # containers may share the name of their host
    except OSError:
        table = 0
    return f"{socket.gethostname()}/{table}"


def start_of(pid: int) -> int:
    """The time when a process of this machine began, in ticks, to tell it from a later one with its number.

    Returns:
        0 where the system does not say, or there is no such process.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return 0 if fields[0] in b"ZX" else int(fields[19])  # a process that is dead and not yet buried
    except (OSError, ValueError, IndexError):
        return 0
