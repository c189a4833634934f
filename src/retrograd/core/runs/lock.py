"""A lock that dies with its process."""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
import time
from pathlib import Path

from retrograd.core.addresses import is_remote
from retrograd.core.files import refuse_link

if sys.platform != "win32":
    import fcntl

_RETRY_SECONDS = 0.01


class Lock:
    """An exclusive lock on a file, held by a process until it releases it or dies.

    Where the file system has no locks it is always granted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self, wait: float = 0.05) -> bool:
        """Try to take the lock for ``wait`` seconds, which bridges somebody's look at it.

        Raises:
            RunWriteError: it is a link.
            OSError: if the file cannot be created.
        """
        descriptor = open_lock(refuse_link(self.path), os.O_RDWR | os.O_CREAT)
        deadline = time.monotonic() + wait
        while not _try_lock(descriptor, shared=False):
            if time.monotonic() >= deadline:
                os.close(descriptor)
                return False
            time.sleep(_RETRY_SECONDS)
        self._descriptor = descriptor
        return True

    def is_of(self, path: Path) -> bool:
        """Return whether the file that was locked is the one of this name: not removed, nor made anew by somebody."""
        return self._descriptor is not None and is_open_file(self._descriptor, path)

    def release(self) -> None:
        """Give the lock back; harmless when it is not held.

        Closing is enough, and in a forked child it leaves the parent's hold alone.
        """
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def open_lock(path: Path, flags: int) -> int:
    """Open the file of a lock; a link is not followed, and a pipe not waited for.

    Raises:
        OSError: it cannot be opened, or is not a file.
    """
    descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o644)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a file", str(path))


def is_open_file(descriptor: int, path: Path) -> bool:
    """Return whether the file of this name is the one that is open; its number goes to no other one while it is."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def is_locked(path: Path) -> bool:
    """Return whether a living process holds the lock of this file."""
    if is_remote(path):  # where no lock dies with its process
        return False
    try:
        descriptor = open_lock(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _try_lock(descriptor, shared=True)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, *, shared: bool) -> bool:
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


# ---- processes ----


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
