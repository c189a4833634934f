"""What processes and their threads were last seen at in the backward pass. Plain data; loads without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
class ThreadState:
    """What a thread was last seen at.

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
    """What a process was last seen at.

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
    threads: tuple[ThreadState, ...]
    fault: str = ""

    @property
    def inside(self) -> list[tuple[ThreadState, RingEvent]]:
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
    def last_thread(self) -> ThreadState | None:
        """The thread whose pass began last; None before the first pass."""
        asked = [thread for thread in self.threads if thread.passes]
        return max(asked, key=lambda thread: thread.passes, default=None)
