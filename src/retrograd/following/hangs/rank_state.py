"""The last positions of processes and threads in the backward pass, as data and in words. Loads without torch."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from retrograd.core.amounts import show_duration

State = Literal["node", "pass begins", "pass ends", "pass failed"]


@dataclass(frozen=True, slots=True)
class RingEvent:
    """Something that happened in a backward pass.

    Attributes:
        state: what happened.
        name: kind of the node; empty for a pass.
        number: its sequence number, or the number of the pass; None for a leaf's node.
        time: when it began, in nanoseconds since 1970. Of a node inside which another pass has just ended, when the
            node began.
        depth: 0, or how many passes that pass is inside of; 0 for a node.
        count: place in the order of its thread's events.
        module: the module in whose forward the node was made; None where that is not known.
    """

    state: State
    name: str
    number: int | None
    time: int
    depth: int
    count: int
    module: str | None = None


@dataclass(frozen=True, slots=True)
class ThreadPosition:
    """The last seen position of a thread.

    Attributes:
        ident: Python's number of the thread.
        native: that of the operating system.
        name: its name.
        depth: how many passes it has begun and not ended.
        passes: number of its outermost pass, or of its last one: 1, 2, …; 0 before the first.
        node: how many nodes of that pass have begun in this thread.
        begun: when that pass began, in nanoseconds since 1970.
        ended: when its last pass ended; 0 before that.
        failed: whether that one raised.
        events: its last events, oldest first.
    """

    ident: int
    native: int
    name: str
    depth: int
    passes: int
    node: int
    begun: int
    ended: int
    failed: bool
    events: tuple[RingEvent, ...]

    @property
    def last(self) -> RingEvent | None:
        """The newest event."""
        return self.events[-1] if self.events else None


@dataclass(frozen=True, slots=True)
class RankState:
    """The last seen positions of a process.

    Attributes:
        rank, pid, host: which process.
        path: its ring; None for one that is in memory only.
        read: when this was read, in nanoseconds since 1970.
        alive: whether the process is there; None where that cannot be told, for it ran on another machine.
        closed: when it stopped to write; 0 if it has not said so.
        threads: those that ran nodes.
        fault: why the ring cannot be read; empty if it can.
    """

    rank: int
    pid: int
    host: str
    path: Path | None
    read: int
    alive: bool | None
    closed: int
    threads: tuple[ThreadPosition, ...]
    fault: str = ""

    @property
    def inside(self) -> list[tuple[ThreadPosition, RingEvent]]:
        """The threads that are inside a pass, each with the node that it is at: the one that moved last comes first.

        Where the pass has begun and no node has, the event is the beginning. A thread of the engine's own counts
        while a pass runs that began before the thread's last node did.
        """
        begun = [thread.begun for thread in self.threads if thread.depth]
        found = [
            (thread, thread.last)
            for thread in self.threads
            if thread.last is not None
            and (thread.depth or (begun and thread.last.state == "node" and thread.last.time >= min(begun)))
        ]
        return sorted(found, key=lambda place: place[1].time, reverse=True)

    @property
    def last_thread(self) -> ThreadPosition | None:
        """The thread whose pass began last; None before the first pass."""
        asked = [thread for thread in self.threads if thread.passes]
        return max(asked, key=lambda thread: thread.passes, default=None)


# ---- words ----

_SECOND = 1_000_000_000


def describe_age(nanoseconds: int) -> str:
    """Describe a duration, as in ``"0.4 s"``, ``"42 s"``, ``"3 min 20 s"``, ``"2 h 5 min"``."""
    return show_duration(nanoseconds / _SECOND)


def describe_event(event: RingEvent) -> str:
    """Describe an event, as in ``"AddmmBackward0 (number 17, module blocks.3)"``."""
    if event.state != "node":
        return event.state
    about = [f"number {event.number}"] if event.number is not None else []
    if event.module is not None:
        about.append(f"module {event.module}")
    return f"{event.name} ({', '.join(about)})" if about else event.name


def describe_place(thread: ThreadPosition, event: RingEvent) -> str:
    """Describe where a thread is, as in ``"inside AddmmBackward0 (number 17), node 3 of pass 2"``."""
    if not thread.depth:  # a thread of the engine's own
        return f"inside {describe_event(event)}"
    if event.state == "pass begins":
        return f"at the beginning of pass {thread.passes}, before its first node"
    if event.state != "node":
        return f"between two passes inside pass {thread.passes}"
    return f"inside {describe_event(event)}, node {thread.node} of pass {thread.passes}"


def describe_places(state: RankState) -> str:
    """Describe where a process is, as in ``"inside AddmmBackward0 (number 17), node 3 of pass 2, for 42 s"``."""
    found = [
        f"{describe_place(thread, event)}, for {describe_age(state.read - event.time)}"
        for thread, event in state.inside
    ]
    return "; ".join(found) or describe_outside(state)


def describe_outside(state: RankState) -> str:
    """Describe the last pass of a process that is in none now."""
    thread = state.last_thread
    if thread is None:
        return "no backward pass yet"
    how = "failed" if thread.failed else "ended"
    return f"outside of a pass; pass {thread.passes} {how} {describe_age(state.read - thread.ended)} ago"


def describe_state(state: RankState, reason: str) -> str:
    """A report of one process: where each of its threads is, and its last events.

    Args:
        state: what its ring says.
        reason: why the report is written.
    """
    when = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(state.read // _SECOND))
    lines = [f"Rank {state.rank}, pid {state.pid} on {state.host}, {when}", f"Why this was written: {reason}", ""]
    places = state.inside
    lines += [
        f"{thread.name}: {describe_place(thread, event)}, for {describe_age(state.read - event.time)}"
        for thread, event in places
    ]
    if not places:
        lines.append(describe_outside(state))
    for thread in state.threads:
        lines += [
            "",
            f"Last events in {thread.name} (thread {thread.native}), newest last:",
            *_list_events(state, thread),
        ]
    return "\n".join(lines) + "\n"


def describe_stacks() -> str:
    """The Python stacks of all threads of this process but this one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    del frames[threading.get_ident()]  # a frame that holds itself is a cycle
    parts = ["Python stacks, the innermost call last:"]
    for ident, frame in frames.items():
        stack = "".join(traceback.format_stack(frame)).rstrip()
        parts.append(f"\n{names.get(ident, 'a thread that Python did not start')} (thread {ident}):\n{stack}")
    return "\n".join(parts) + "\n"


def _list_events(state: RankState, thread: ThreadPosition) -> Iterator[str]:
    for event in thread.events:
        ago = f"{-max(state.read - event.time, 0) / _SECOND:,.3f} s"
        if event.state == "node":
            number = "" if event.number is None else str(event.number)
            yield f"  {ago:>14}  {event.name:<32} {number:>8}  {event.module or ''}".rstrip()
        else:
            yield f"  {ago:>14}  {event.state}"
