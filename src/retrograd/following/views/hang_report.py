"""Places of all ranks of a run in their backward passes, and the ranks that differ. Loads without torch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group
from rich.text import Text

from retrograd.core.views.terminal import giving_text, open_console, print_name, show_frames
from retrograd.following.hangs.rank_state import (
    RankState,
    RingEvent,
    ThreadPosition,
    describe_age,
    describe_outside,
    describe_place,
    describe_places,
)
from retrograd.following.hangs.ring_file import read_rings

INTERVAL = 1.0
"""Seconds between two looks at a run."""

STUCK = 1
"""Exit code of :func:`watch_run` when a rank was in one node for longer than the limit, or died inside a pass."""


@dataclass(frozen=True, slots=True)
class _Position:
    """The progress of a rank. Ordered by it: in the pass, node by node, and then out of it."""

    passes: int
    is_outside: bool
    node: int
    text: str


def print_ranks(run: Path | str, *, limit: float | None = None, file: TextIO | None = None) -> None:
    """Print a line for each rank: where it is in its backward pass, and since when; and then which ranks differ.

    Args:
        run: a run folder that ``rg.watch_hangs`` writes to, or wrote to.
        limit: mark ranks that have been in one node for more than so many seconds.
        file: where to print; standard output when left out.

    Raises:
        TraceError: there is no ring of events in this folder.
    """
    console = open_console(file)
    console.print(_render(console, read_rings(run), limit))


format_ranks = giving_text(print_ranks)


def watch_run(
    run: Path | str,
    *,
    once: bool = False,
    limit: float | None = None,
    interval: float = INTERVAL,
    file: TextIO | None = None,
) -> int:
    """Show where each rank is, over and over: redrawn in a terminal, and printed when something moved anywhere else.

    Args:
        run: a run folder that ``rg.watch_hangs`` writes to, or wrote to.
        once: look once.
        limit: mark ranks that have been in one node for more than so many seconds.
        interval: seconds between two looks.
        file: where to print; standard output when left out.

    Returns:
        0, or ``STUCK``, as things are at the last look. It ends when no process of the run writes any more, as far as
        its rings can be read, or by Ctrl-C.

    Raises:
        TraceError: there is no ring of events in this folder.
    """
    console = open_console(file)
    states = read_rings(run)
    if once:
        console.print(_render(console, states, limit))
        return _judge(states, limit)

    def list_frames() -> Iterator[Group]:
        nonlocal states
        shown: object = None
        while True:
            key = [(*_key(state), is_stuck(state, limit)) for state in states]
            if console.is_terminal or key != shown:  # a terminal also counts the seconds
                yield _render(console, states, limit)
                shown = key
            if _is_over(states):
                return
            time.sleep(interval)
            states = read_rings(run)

    show_frames(console, list_frames())
    return _judge(states, limit)


def describe_ranks(states: Sequence[RankState], limit: float | None = None) -> list[str]:
    """A line for each rank, and one that compares them.

    Args:
        states: as from ``read_rings``.
        limit: seconds in one node from which on a rank is marked with an exclamation mark.
    """
    doubled = {state.rank for state in states if sum(state.rank == other.rank for other in states) > 1}
    labels = [f"rank {state.rank}" + (f" (pid {state.pid})" if state.rank in doubled else "") for state in states]
    width = max((len(label) for label in labels), default=0)
    lines = [
        f"{'!' if is_stuck(state, limit) else ' '} {label:<{width}}  {describe_rank(state)}"
        for state, label in zip(states, labels, strict=True)
    ]
    comparison = compare_ranks(states)
    return [*lines, comparison] if comparison else lines


def describe_rank(state: RankState) -> str:
    """Describe where one process is, as in ``"inside MmBackward0 (number 17), node 3 of pass 2, for 42 s"``."""
    if state.fault:
        return f"cannot be read: {state.fault}"
    if state.closed:
        return f"no longer watched: {describe_places(state)}"
    if state.alive is False:
        return f"dead (process {state.pid} is gone), last seen {_describe_last(state)}"
    return describe_places(state) if state.alive else f"{describe_places(state)} (on {state.host})"


def compare_ranks(states: Sequence[RankState]) -> str:
    """Compare the positions of ranks, those furthest behind first; empty for fewer than two.

    A pass is counted from the start of each process, and so is a node from the start of its pass: ranks that do the
    same have the same numbers.
    """
    current = sorted((state for state in states if not state.fault), key=_is_current)
    positions = {state.rank: _find_position(state) for state in current}  # of two with one rank the living one counts
    groups: dict[_Position, list[int]] = {}
    for rank, position in sorted(positions.items()):
        groups.setdefault(position, []).append(rank)
    ordered = sorted(groups.items(), key=lambda group: (group[0].passes, group[0].is_outside, group[0].node))
    if len(positions) < 2:
        return ""
    if len(ordered) == 1:
        return f"all {len(positions)} ranks {ordered[0][0].text}"
    if len(ordered) == 2 and len(positions) > 2:
        ordered.sort(key=lambda group: len(group[1]))
        others, ranks = ordered.pop()
        return f"{_describe_group(*ordered[0])}; the other {len(ranks)} {others.text}"
    return "; ".join(_describe_group(*group) for group in ordered)


def _describe_last(state: RankState) -> str:
    place = _newest(state)
    if place is None:
        return describe_outside(state)
    return f"{describe_place(*place)}, {describe_age(state.read - place[1].time)} ago"


def is_stuck(state: RankState, limit: float | None) -> bool:
    """Whether a rank died inside a pass, or has been in one node for more than ``limit`` seconds."""
    place = _newest(state)
    if place is None or state.closed:
        return False
    if state.alive is False:
        return True
    return limit is not None and state.read - place[1].time > limit * 1e9


def _judge(states: Sequence[RankState], limit: float | None) -> int:
    return STUCK if any(is_stuck(state, limit) for state in states) else 0


def _newest(state: RankState) -> tuple[ThreadPosition, RingEvent] | None:
    places = state.inside
    return places[0] if places else None


def _is_current(state: RankState) -> bool:
    return state.alive is not False and not state.closed


def _find_position(state: RankState) -> _Position:
    places = state.inside
    asking = next((thread for thread, _ in places if thread.depth), None)
    if asking is None:
        thread = state.last_thread
        if thread is None:
            return _Position(0, True, 0, "have begun no pass")
        how = "failed in" if thread.failed else "ended"
        return _Position(thread.passes, True, 0, f"have {how} pass {thread.passes}")
    thread, event = places[0]
    what = f"inside {event.name}" if event.state == "node" else "before a node"
    where = f"node {thread.node} of pass" if thread is asking and thread.node else "in pass"
    return _Position(asking.passes, False, thread.node, f"are {what}, {where} {asking.passes}")


def _describe_group(position: _Position, ranks: list[int]) -> str:
    text = position.text
    if len(ranks) == 1:
        verb, _, rest = text.partition(" ")
        text = f"{'is' if verb == 'are' else 'has'} {rest}"
    return f"{_name_ranks(ranks)} {text}"


def _name_ranks(ranks: list[int]) -> str:
    """``"rank 1"``, ``"ranks 0, 2-7"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    named = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {named}"


def _render(console: Console, states: Sequence[RankState], limit: float | None) -> Group:
    lines = describe_ranks(states, limit)
    styles = [_style(state, limit) for state in states] + ["bold"]
    return Group(*(Text(print_name(console, line), style=style) for line, style in zip(lines, styles, strict=False)))


def _style(state: RankState, limit: float | None) -> str:
    if state.fault or is_stuck(state, limit):
        return "bold red"
    return "dim" if state.closed or state.alive is False else ""


def _is_over(states: Sequence[RankState]) -> bool:
    return not any(_is_current(state) for state in states if not state.fault)


def _key(state: RankState) -> tuple[object, ...]:
    last = tuple(thread.last.count for thread in state.threads if thread.last is not None)
    return state.rank, state.pid, state.alive, bool(state.closed), last, state.fault
