"""Watch for backward passes that hang.

The training thread only notes each node in a ring. A thread beside it looks at the ring now and then, and writes down
what it finds when nothing has moved for too long, or when a signal comes.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from retrograd.core.errors import TraceError
from retrograd.core.files import write_whole
from retrograd.core.hooks.backward import EngineRun, backward_followers
from retrograd.core.hooks.checkpoints import is_failure
from retrograd.core.hooks.listeners import never_raise
from retrograd.core.hooks.node_tap import NodeTap, NodeTaps
from retrograd.core.hooks.reach import PassNodes
from retrograd.core.notices import Notices, print_text
from retrograd.following.graph.origins import Origins
from retrograd.following.hangs.rank_state import (
    RankState,
    RingEvent,
    describe_age,
    describe_event,
    describe_stacks,
    describe_state,
)
from retrograd.following.hangs.ring import Ring
from retrograd.following.hangs.signal_tap import SignalTap

THREAD_NAME = "retrograd-hang"

_LONGEST_PAUSE = 1.0
"""Seconds between two looks at the ring; a quarter of the limit where that is less."""

_LAST = 50
"""Events of each thread in a report."""

_JOIN_SECONDS = 5.0


def watch_hangs(
    path: Path | str | None = None,
    *,
    limit: float | None = None,
    on_signal: int | None = None,
    origins: Origins | None = None,
) -> HangWatch:
    """Record the last events of every backward pass of this process, and write a report when one hangs.

    The ring of events lies in the run folder: ``retrograd hangs RUN`` reads it while the process runs, hangs or is
    dead, and compares the ranks. A report is a text file beside it, ``hang-1.txt``: the node, what ran before it, and
    the Python stacks of all threads. One line on stderr says where it is.

    Results, hooks and errors stay as they are. A forked child is not watched.

    Args:
        path: the run folder; the ring is kept in memory and reports go to stderr when left out.
        limit: report a pass that stays in one node for more than so many seconds, once for each such node. What runs
            between two nodes counts for the first: hooks, and what a reducer waits for.
        on_signal: report when this signal comes, as in ``signal.SIGUSR1``; what handled it before runs too. The
            report is written even while the main thread waits inside an operation, unless that holds Python's lock.
        origins: names the modules of nodes: ``rg.record_origins(model, lines=False)``, entered around the forwards.
            It is asked only of a pass that does not move.

    Returns:
        A handle with ``close()``, to be used in a ``with`` statement too.

    Raises:
        TraceError: the limit is not a positive number; the signal cannot be handled; or signals are wanted outside of
            the main thread.
        RunWriteError: the folder cannot be written.
    """
    if limit is not None and not limit > 0:
        raise TraceError(
            f"A limit of {limit!r} seconds is not a positive number.", repair="give a number above 0, or leave it out."
        )
    return HangWatch(path, limit, on_signal, origins)


class HangWatch:
    """Follows every backward pass until it is closed. Made by :func:`watch_hangs`.

    Attributes:
        ring: what is noted.
        follower: is notified of passes; to be notified of one that had begun before by whoever knows of it.
    """

    def __init__(
        self, path: Path | str | None, limit: float | None, on_signal: int | None, origins: Origins | None
    ) -> None:
        self._signal = SignalTap(on_signal) if on_signal is not None else None
        try:
            self.ring = Ring.create(path)
        except BaseException:
            if self._signal is not None:
                self._signal.close()
            raise
        self._folder = self.ring.folder
        self._origins = origins
        self._last_places: object = None
        self._named: object = None
        self._stalls = StallDetector(limit) if limit is not None or origins is not None else None
        self._writing = threading.Lock()
        self._closing = threading.Event()
        self.follower = _Follower(self.ring)
        backward_followers.add(self.follower)
        self._thread: threading.Thread | None = None
        if self._signal is not None or self._stalls is not None:
            self._thread = threading.Thread(target=self._watch, name=THREAD_NAME, daemon=True)
            self._thread.start()
        _watches.add(self)
        atexit.register(self.close)  # a ring that was not closed is that of a process that died

    def report(self, reason: str = "it was asked for") -> Path | None:
        """Write a report now.

        Args:
            reason: why, for whoever reads it.

        Returns:
            Where it is; None if it went to stderr.
        """
        with self._writing:
            self._name_modules()
            state = self.ring.read(_LAST)
            text = f"{describe_state(state, reason)}\n{describe_stacks()}"
            path = _write_report(self._folder, text) if self._folder is not None else None
        _say(f"retrograd: rank {state.rank}: {reason}; {f'see {path}' if path else f'report:{chr(10)}{text}'}")
        return path

    def close(self) -> None:
        """Watch no more. The ring and the reports stay.

        A handler of signals can be taken back in the main thread only; if closed in another one, ours remains, and
        does no more than call the one before.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        atexit.unregister(self.close)
        _watches.discard(self)
        backward_followers.remove(self.follower)
        if self._signal is not None:
            self._signal.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)
        if self._signal is not None:
            self._signal.close()
        self.ring.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _watch(self) -> None:
        pause = self._stalls.pause if self._stalls is not None else None
        while not self._closing.is_set():
            try:
                if self._wait(pause) and not self._closing.is_set():
                    self.report("a signal came")
                self._look()
            except Exception as error:  # a fault of ours is notified of once, not every second
                _say(f"retrograd: hangs are watched for no more: {type(error).__name__}: {error}")
                return

    def _look(self) -> None:
        if self._stalls is None:
            return
        state = self.ring.read(last=2)
        places = [(thread.ident, event.count) for thread, event in state.inside]
        if places and places == self._last_places != self._named:
            self._named = places
            self._name_modules()  # for who looks from outside
        self._last_places = places
        for reason in self._stalls.look(state):
            self.report(reason)

    def _name_modules(self) -> None:
        """Record in what modules the last nodes were made, now that there is time for it."""
        if self._origins is None:
            return
        for thread in self.ring.read(_LAST).threads:
            for event in thread.events:
                origin = None
                if event.state == "node" and event.number is not None and event.module is None:
                    origin = self._origins.find(event.number)
                if origin is not None and origin.module is not None and event.number is not None:
                    call = f"#{origin.call}" if origin.call > 1 else ""
                    self.ring.name_modules(event.number, event.number + 1, origin.module + call)
        self.ring.write_modules()

    def _wait(self, pause: float | None) -> bool:
        if self._signal is not None:
            return self._signal.wait(pause)
        self._closing.wait(pause)
        return False

    def _abandon(self) -> None:
        """In a forked child: nothing of ours runs, and the parent's ring and sockets are left alone."""
        self._closing.set()
        self.follower.is_closed = True
        if self._signal is not None:
            self._signal.close()


class StallDetector:
    """Reports passes that have not moved for too long, each stop once.

    Args:
        limit: seconds; None for no end.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit = math.inf if limit is None else limit
        self.pause = min(self.limit / 4, _LONGEST_PAUSE)
        self._seen: dict[int, _Stall] = {}

    def look(self, state: RankState) -> Iterator[str]:
        """Compare with what was seen before.

        Yields:
            For each pass that has reached the limit since the last look, what to say of it.
        """
        now = time.monotonic()
        places = state.inside
        workers = tuple((thread.ident, event.count) for thread, event in places if not thread.depth)
        before, self._seen = self._seen, {}
        for thread, event in places:
            if not thread.depth:
                continue
            place = (event.count, workers)
            stop = before.get(thread.ident)
            if stop is None or stop.place != place:
                stop = _Stall(place, now)
            self._seen[thread.ident] = stop
            if now - stop.since >= self.limit and not stop.is_told:
                stop.is_told = True
                newest = max(
                    (event for other, event in places if other is thread or not other.depth), key=lambda e: e.time
                )
                yield _describe_stall(newest, state.read)


@dataclass(slots=True)
class _Stall:
    """A place that a pass was seen at, since when (monotonic seconds), and whether that was reported."""

    place: tuple[Any, ...]
    since: float
    is_told: bool = False


def _describe_stall(event: RingEvent, now: int) -> str:
    where = f"inside {describe_event(event)}" if event.state == "node" else f"in a backward pass ({event.state})"
    return f"{where} for {describe_age(now - event.time)}"


class _Follower:
    """Taps each pass while it runs."""

    def __init__(self, ring: Ring) -> None:
        self.is_closed = False
        self._ring = ring
        self._taps = NodeTaps()
        self._running: dict[EngineRun, tuple[PassNodes, NodeTap] | None] = {}
        self._notices = Notices()

    @never_raise()
    def run_begins(self, run: EngineRun) -> None:
        if self.is_closed:
            return
        self._running[run] = None
        self._ring.pass_begins(is_nested=run.is_nested)
        found = PassNodes(run)
        self._running[run] = found, self._taps.tap(found, self._ring.see, self._ring.see, several=False)

    @never_raise()
    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        if run not in self._running:
            return
        tapped = self._running.pop(run)
        if tapped is not None:
            found, tap = tapped
            self._taps.end(tap)
            found.release()
        self._ring.pass_ends(is_failure(error))

    def fault(self, where: str, error: Exception) -> None:
        """Report, once, an internal error."""
        self._notices.warn_once("pass", f"A backward pass cannot be watched: {type(error).__name__}: {error}")


def _write_report(folder: Path, text: str) -> Path | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)  # a recording that is told its rank late may have moved it
        taken = {path.name for path in folder.glob("hang-*.txt")}
        number = next(number for number in range(1, len(taken) + 2) if f"hang-{number}.txt" not in taken)
        path = folder / f"hang-{number}.txt"
        with write_whole(path) as file:
            file.write(text.encode("utf-8", "replace"))
    except OSError:
        return None
    return path


def _say(text: str) -> None:
    with contextlib.suppress(Exception):  # stderr may be closed
        print_text(text, file=sys.stderr, flush=True)


_watches: weakref.WeakSet[HangWatch] = weakref.WeakSet()


def _abandon_in_child() -> None:
    for watch in list(_watches):
        watch._abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_in_child)
