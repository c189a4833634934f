"""The last events of this process's backward passes, in a file that outlives it.

Each thread writes to a lane of its own. An event costs a third of a microsecond: four numbers are packed into mapped
memory, and the operating system brings that to the file whatever becomes of the process.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import get_ident
from typing import Any

from retrograd.core.addresses import local_folder
from retrograd.core.errors import RunWriteError
from retrograd.core.files import refuse_link
from retrograd.core.hooks.engine import current_node, uncompiled
from retrograd.core.hooks.nodes import name_of, number_of
from retrograd.core.ranks.processes import ask_rank
from retrograd.core.runs.layout import LOCK, RING
from retrograd.core.runs.lock import Lock, start_of
from retrograd.following.hangs.rank_state import RankState
from retrograd.following.hangs.ring_file import (
    BACK,
    BEGINS,
    ENDS,
    ENTRY,
    FAILED,
    HEADER,
    HEADER_SIZE,
    LANE,
    LANE_SIZE,
    MAGIC,
    MODULES,
    NAMES,
    NODE,
    VERSION,
    choose_folder,
    first_line,
    lane_size,
    map_ring,
    parse_ring,
    size_of,
)

LANES = 8
"""Threads that get a lane of their own; where more are alive, the others share the last one."""

_MOST_KINDS = 4096
_MOST_SPANS = 4096
_LONGEST_MODULES = 1 << 20
_ADMISSION_SECONDS = 10.0

_AT_NODE = NODE << 32


@dataclass(slots=True)
class _Lane:
    """The part of a ring that one thread writes."""

    start: int
    ident: int
    name: int
    step: Callable[[], int] = field(default_factory=lambda: count(1).__next__)
    around: list[tuple[int, int, int]] = field(default_factory=list)
    """For each pass that the thread is in, the entry that was its last one before."""
    passes: int = 0
    first: int = 0
    begun: int = 0
    ended: int = 0
    failed: bool = False

    @property
    def base(self) -> int:
        return self.start + LANE_SIZE


class Ring:
    """The last events of this process's backward passes. Made by :meth:`create`.

    Attributes:
        see: ``see(gradient)`` notes the node that the engine is at; the gradient is not looked at. It never raises.
        folder: the rank folder that holds the file; None where there is none.
    """

    def __init__(self, folder: Path | None, rank: int, capacity: int) -> None:
        self.folder = folder
        self._capacity = capacity
        self._made = time.time_ns()
        self._rank = rank
        self._pid = os.getpid()
        self._passes = 0
        self._closed = 0
        self._lock = threading.RLock()  # a signal may come while it is held
        self._names: list[str] = [first_line(self._made)]
        self._name_ids: dict[str, int] = {}
        self._kinds: dict[type, int] = {}
        self._lanes: list[_Lane] = []
        self._lane_of: dict[int, _Lane] = {}
        self._writers: dict[int, tuple[Callable[[], int], int]] = {}
        self._spans: deque[tuple[int, int, str]] = deque(maxlen=_MOST_SPANS)
        self._new_spans: list[tuple[int, int, str]] = []
        self._buffer = map_ring(folder, self._header(), size_of(LANES, capacity), self._names[0])
        self.see, self._exchange = _make_see(self._buffer, capacity, self._writers, self._kinds, self._meet)
        _rings.add(self)

    @classmethod
    def create(cls, run: Path | str | None, capacity: int = 1024, *, rank: int | None = None) -> Ring:
        """Begin a ring.

        Args:
            run: the run folder, made if it is not there; None for a ring in memory.
            capacity: how many events of each thread are kept, rounded up to a power of two.
            rank: this process's; as torch.distributed or ``RANK`` say by default. Where a living process writes a
                ring for that rank already, a folder beside it is taken, as recordings do.

        Raises:
            RunWriteError: the file cannot be written.
        """
        rank = ask_rank() if rank is None else rank
        capacity = 1 << max(capacity - 1, 1).bit_length()
        if run is None:
            return cls(None, rank, capacity)
        run = local_folder(run)
        try:
            run.mkdir(parents=True, exist_ok=True)
            lock = Lock(run / LOCK)
            lock.acquire(_ADMISSION_SECONDS)
            try:
                folder = refuse_link(choose_folder(run, rank))
                folder.mkdir(exist_ok=True)
                return cls(folder, rank, capacity)
            finally:
                lock.release()
        except RunWriteError:
            raise
        except OSError as error:
            raise RunWriteError(
                f"The run folder {str(run)!r} cannot be written: {error.strerror or error}.",
                repair="give a folder that can be created, on a disk with room.",
            ) from error

    @property
    def rank(self) -> int:
        """The rank of this process, as known when its last pass began."""
        return self._rank

    def pass_begins(self, *, is_nested: bool = False) -> None:
        """A backward pass begins in this thread.

        Args:
            is_nested: whether it runs inside another one.
        """
        lane = self._lane_of.get(get_ident()) or self._open_lane()
        now = time.time_ns()
        stamp = lane.step()
        lane.around.append(self._entry(lane, stamp - 1))
        if is_nested:
            lane.first += 1
        else:
            self._passes += 1
            lane.passes, lane.begun, lane.first = self._passes, now, stamp
            if lane.passes == 1 or self._rank != ask_rank():  # processes may be told their rank late
                self._rank = ask_rank()
                HEADER.pack_into(self._buffer, 0, *self._header())
            if self._new_spans:
                self.write_modules()
        self._write(lane, now, lane.passes, BEGINS, len(lane.around) - 1, stamp)
        self._write_lane(lane)

    def pass_ends(self, failed: bool = False) -> None:
        """The pass that began last in this thread has ended."""
        lane = self._lane_of.get(get_ident())
        if lane is None or not lane.around:
            return
        now = time.time_ns()
        time_before, number, what = lane.around.pop()
        self._write(lane, now, lane.passes, FAILED if failed else ENDS, len(lane.around), lane.step())
        lane.first += 1
        if what >> 32 & 0xFF in (NODE, BACK):  # it ran inside this node, which goes on
            lane.first += 1
            stamp = lane.step()
            place = lane.base + stamp % self._capacity * ENTRY.size
            ENTRY.pack_into(self._buffer, place, time_before, number, what & 0xFFFFFFFF | BACK << 32, stamp)
        if not lane.around:
            lane.ended, lane.failed = now, failed
        self._write_lane(lane)

    def name_modules(self, first: int, last: int, text: str) -> None:
        """Record that a call of a module made the nodes from ``first`` up to but not including ``last``.

        It is written when the next pass begins, or by :meth:`write_modules`. Numbers of different threads are not told
        apart.
        """
        self._new_spans.append((first, last, " ".join(text.split())))

    def read(self, last: int = 64) -> RankState:
        """Read the positions of this process.

        Args:
            last: how many events of each thread to read.
        """
        content = bytes(self._buffer)
        path = self.folder / RING if self.folder is not None else None
        return parse_ring(content, self._names, [*self._spans, *self._new_spans], path=path, last=last)

    def close(self) -> None:
        """Write no more. The file stays; what is seen from now on is forgotten."""
        if not self._closed:
            self._closed = time.time_ns()
            HEADER.pack_into(self._buffer, 0, *self._header())
            self._forget()

    def _forget(self) -> None:
        """Go on in memory that nobody reads: a thread may be in the middle of a pass."""
        self._buffer = bytearray(self._buffer)
        self._exchange(self._buffer)
        self.folder = None
        _rings.discard(self)

    def _header(self) -> tuple[Any, ...]:
        host = platform.node().encode()[:128]
        start = start_of(self._pid)
        return (
            *(MAGIC, VERSION, self._rank, LANES, self._capacity, self._pid, start),
            *(self._made, self._closed, host),
        )

    def _meet(self, node: Any) -> None:
        """Record a node of a kind, or in a thread, that was not seen before."""
        if node is None:
            return
        with contextlib.suppress(Exception):  # the program's backward pass goes on whatever becomes of ours
            lane = self._lane_of.get(get_ident()) or self._open_lane()
            kind = type(node)
            name = self._intern(name_of(node))
            if name_of(node) == kind.__name__:  # kinds that torch has no type of their own for share one
                if len(self._kinds) >= _MOST_KINDS:
                    self._kinds.clear()
                self._kinds[kind] = _AT_NODE | name
            stamp = lane.step()
            place = lane.base + stamp % self._capacity * ENTRY.size
            ENTRY.pack_into(self._buffer, place, time.time_ns(), number_of(node), _AT_NODE | name, stamp)

    def _open_lane(self) -> _Lane:
        with self._lock:
            ident = get_ident()
            name = self._intern(threading.current_thread().name)
            lane = self._free_lane(ident, name)
            self._lane_of[ident] = lane
            self._writers[ident] = (lane.step, lane.base)
            self._write_lane(lane)
            return lane

    def _free_lane(self, ident: int, name: int) -> _Lane:
        if len(self._lanes) < LANES:
            lane = _Lane(HEADER_SIZE + len(self._lanes) * lane_size(self._capacity), ident, name)
            self._lanes.append(lane)
            return lane
        living = set(sys._current_frames())  # the dict itself has this very frame in it: a cycle
        for place, old in enumerate(self._lanes):
            if old.ident not in living:
                self._lane_of.pop(old.ident, None)
                self._writers.pop(old.ident, None)
                self._buffer[old.start : old.start + lane_size(self._capacity)] = bytes(lane_size(self._capacity))
                self._lanes[place] = _Lane(old.start, ident, name)
                return self._lanes[place]
        return self._lanes[-1]

    def _intern(self, name: str) -> int:
        with self._lock:
            name = " ".join(name.split())
            number = self._name_ids.get(name)
            if number is None:
                number = self._name_ids[name] = len(self._names)
                self._names.append(name)
                self._append(NAMES, f"{name}\n")
            return number

    def write_modules(self) -> None:
        """Write what :meth:`name_modules` was told since the last pass began."""
        with self._lock:
            spans, self._new_spans = self._new_spans, []
            self._spans.extend(spans)
            if self.folder is None:
                return
            with contextlib.suppress(OSError):
                path = self.folder / MODULES
                if path.exists() and path.stat().st_size > _LONGEST_MODULES:
                    spans = list(self._spans)
                    path.unlink()
            self._append(MODULES, "".join(f"{first} {last} {text}\n" for first, last, text in spans))

    def _append(self, name: str, text: str) -> None:
        if self.folder is None:
            return
        with contextlib.suppress(OSError), (self.folder / name).open("ab", buffering=0) as file:
            file.write(text.encode("utf-8", "replace"))

    def _entry(self, lane: _Lane, stamp: int) -> tuple[int, int, int]:
        moment, number, what, found = ENTRY.unpack_from(self._buffer, lane.base + stamp % self._capacity * ENTRY.size)
        return (moment, number, what) if found == stamp else (0, 0, 0)

    def _write(self, lane: _Lane, now: int, number: int, state: int, depth: int, stamp: int) -> None:
        place = lane.base + stamp % self._capacity * ENTRY.size
        ENTRY.pack_into(self._buffer, place, now, number, state << 32 | depth << 40, stamp)

    def _write_lane(self, lane: _Lane) -> None:
        native = threading.get_native_id()
        LANE.pack_into(
            self._buffer,
            lane.start,
            *(lane.ident, native, lane.name, len(lane.around), lane.passes, lane.first),
            *(lane.begun, lane.ended, lane.failed),
        )


def _make_see(
    buffer: Any,
    capacity: int,
    writers: dict[int, tuple[Callable[[], int], int]],
    kinds: dict[type, int],
    meet: Callable[[Any], None],
) -> tuple[Callable[[Any], None], Callable[[Any], None]]:
    """The function that is called for each node, with all that it needs at hand; and one that gives it new memory."""
    mask = capacity - 1
    size = ENTRY.size
    pack = ENTRY.pack_into
    now = time.time_ns

    @uncompiled
    def see(gradient: Any = None) -> None:
        node = current_node()
        try:
            step, base = writers[get_ident()]
            kind = kinds[type(node)]
        except KeyError:
            meet(node)
            return
        stamp = step()
        pack(buffer, base + (stamp & mask) * size, now(), number_of(node), kind, stamp)

    def exchange(memory: Any) -> None:
        nonlocal buffer
        buffer = memory

    return see, exchange


_rings: weakref.WeakSet[Ring] = weakref.WeakSet()


def _forget_in_child() -> None:
    for ring in list(_rings):
        ring._lock = threading.RLock()
        ring._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
