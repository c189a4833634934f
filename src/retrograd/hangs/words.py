"""Where a process is in its backward pass, in words. Loads without torch."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterator

from retrograd.hangs.rank_state import RankState, RingEvent, ThreadState

_SECOND = 1_000_000_000


def describe_age(nanoseconds: int) -> str:
    """How long something takes, as in ``"0.4 s"``, ``"42 s"``, ``"3 min 20 s"``, ``"2 h 5 min"``."""
    seconds = max(nanoseconds, 0) / _SECOND
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def describe_event(event: RingEvent) -> str:
    """What it is, as in ``"AddmmBackward0 (number 17, module blocks.3)"``."""
    if event.state != "node":
        return event.state
    about = [f"number {event.number}"] if event.number is not None else []
    if event.module is not None:
        about.append(f"module {event.module}")
    return f"{event.name} ({', '.join(about)})" if about else event.name


def describe_place(thread: ThreadState, event: RingEvent) -> str:
    """Where a thread is, as in ``"inside AddmmBackward0 (number 17), node 3 of pass 2"``."""
    if not thread.depth:  # a thread of the engine's own
        return f"inside {describe_event(event)}"
    if event.state == "pass begins":
        return f"at the beginning of pass {thread.passes}, before its first node"
    if event.state != "node":
        return f"between two passes inside pass {thread.passes}"
    return f"inside {describe_event(event)}, node {thread.node} of pass {thread.passes}"


def describe_places(state: RankState) -> str:
    """Where a process is, as in ``"inside AddmmBackward0 (number 17), node 3 of pass 2, for 42 s"``."""
    found = [
        f"{describe_place(thread, event)}, for {describe_age(state.read - event.time)}"
        for thread, event in state.inside
    ]
    return "; ".join(found) or describe_outside(state)


def describe_outside(state: RankState) -> str:
    """What a process that is in no pass did last."""
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


def _list_events(state: RankState, thread: ThreadState) -> Iterator[str]:
    for event in thread.events:
        ago = f"{-max(state.read - event.time, 0) / _SECOND:,.3f} s"
        if event.state == "node":
            number = "" if event.number is None else str(event.number)
            yield f"  {ago:>14}  {event.name:<32} {number:>8}  {event.module or ''}".rstrip()
        else:
            yield f"  {ago:>14}  {event.state}"
