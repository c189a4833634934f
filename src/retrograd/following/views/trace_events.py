"""Events of a trace, for all its views: short texts, the events that were chosen, and their own time and memory."""

from __future__ import annotations

import contextlib
import difflib
import math
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TextIO

from retrograd.core.amounts import show_bytes
from retrograd.core.errors import NoSuchNodeError
from retrograd.core.foreign.text import show_plainly
from retrograd.core.notices import print_text
from retrograd.core.views.terminal import print_number
from retrograd.following.graph.node import TensorInfo, matches, shorten_line
from retrograd.following.tracing.trace import BackwardPass, NodeEvent, Trace


def name_call(module: str, call: int) -> str:
    """A module call, as in ``"blocks.3#2"``; the first call has no number."""
    return f"{module}#{call}" if call > 1 else module


def print_tensors(tensors: Sequence[TensorInfo | None]) -> str:
    """Shapes, as in ``float32[4, 8]``, several of them in parentheses; a dash for a gradient that is not there."""
    texts = ["-" if tensor is None else str(tensor) for tensor in tensors]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})" if texts else ""


def print_flow(event: NodeEvent, arrow: str = "→") -> str:
    """Print what went into a node and came out of it, as in ``float32[4] → (float32[4], -)``; nothing leaves a leaf."""
    sides = [print_tensors(tensors) for tensors in (event.incoming, event.outgoing)]
    return f" {arrow} ".join(side for side in sides if side)


def largest(norms: Iterable[float | None]) -> float:
    """The largest norm that is known: NaN counts as larger than any; -1 for none."""
    known = [norm for norm in norms if norm is not None]
    return math.nan if any(map(math.isnan, known)) else max(known, default=-1.0)


def print_norm(norm: float) -> str:
    """A norm to three digits; a dash if it is unknown."""
    return "-" if norm < 0 else "nan" if math.isnan(norm) else print_number(norm)


def make_filter(pattern: str | None) -> Callable[[NodeEvent], bool]:
    """Make a test of events by a glob, which remembers its answer for each place. None lets all events pass."""
    if pattern is None:
        return lambda event: True
    known: dict[tuple[str | None, int, str, str | None], bool] = {}

    def fits(event: NodeEvent) -> bool:
        key = (event.module, event.call, event.name, event.parameter)
        if key not in known:
            known[key] = matches(pattern, event)
        return known[key]

    return fits


def choose_events(events: Sequence[NodeEvent], pattern: str | None) -> list[int]:
    """Indices of the events that a pattern fits; of all for None.

    Raises:
        NoSuchNodeError: it fits none; the nearest places are named.
    """
    fits = make_filter(pattern)
    chosen = [index for index, event in enumerate(events) if fits(event)]
    if pattern is not None and not chosen and events:
        places = list(dict.fromkeys(event.place for event in events))
        near = difflib.get_close_matches(pattern, places, n=5, cutoff=0.3) or places[:5]
        raise NoSuchNodeError(
            f"The pattern {pattern!r} matches no node of this trace.", repair=f"the nearest are {', '.join(near)}."
        )
    return chosen


def own_times(trace: Trace) -> list[int]:
    """Nanoseconds of each event without passes that ran inside it (reentrant checkpointing)."""
    return _without_inner(trace, [event.end - event.begin for event in trace.events], _span_of)


def own_memory(trace: Trace) -> list[int]:
    """Bytes that each event gained without nodes that ran inside it; 0 where memory was not measured."""
    gained = [event.memory or 0 for event in trace.events]
    inner: dict[int, int] = defaultdict(int)
    for event, count in zip(trace.events, gained, strict=True):
        inner[event.run] += count
    return _without_inner(trace, gained, lambda run: inner[run.number])


def _span_of(run: BackwardPass) -> int:
    return run.end - run.begin


def _without_inner(trace: Trace, totals: list[int], share: Callable[[BackwardPass], int]) -> list[int]:
    """Take from each event the share of every pass that ran directly inside of it."""
    own = list(totals)
    if any(run.depth for run in trace.passes):
        around = _Surroundings(trace)
        for run in trace.passes:
            index = around.find(run)
            if index is not None:
                own[index] -= share(run)
    return own


class _Surroundings:
    """Finds the event inside which a pass was started."""

    def __init__(self, trace: Trace) -> None:
        self._events = trace.events
        self._lists: dict[tuple[int, int], list[int]] = defaultdict(list)
        depths = {run.number: run.depth for run in trace.passes}
        for index, event in enumerate(trace.events):
            self._lists[event.thread, depths.get(event.run, 0)].append(index)
        for indices in self._lists.values():
            indices.sort(key=lambda index: self._events[index].begin)

    def find(self, run: BackwardPass) -> int | None:
        """Index of that event; None for an outermost pass, or if no event is known."""
        indices = self._lists.get((run.thread, run.depth - 1), []) if run.depth else []
        place = bisect_right(indices, run.begin, key=lambda index: self._events[index].begin)
        index = indices[place - 1] if place else None
        return index if index is not None and run.begin < self._events[index].end else None


# ---- a line for each node that has finished ----
#
# Here no rich is loaded: that draws random numbers when it is, and a script that is traced loads it at its own time.


def format_event(event: NodeEvent) -> str:
    """One line for a node that has run: time, place, shapes, what was measured, source line.

    Returns:
        As in ``"   0.132 ms  blocks.3:SoftmaxBackward0  float32[4, 8] → float32[4, 8]  model.py:30"``.
    """
    parts = [f"{(event.end - event.begin) / 1e6:8.3f} ms", event.place, print_flow(event)]
    norms = [print_norm(largest(norms)) for norms in (event.norms_in, event.norms_out) if norms]
    if set(norms) - {"-"}:
        parts.append(f"norm {' → '.join(norms)}")
    if event.memory is not None:
        parts.append(show_bytes(event.memory, signed=True))
    parts.append(shorten_line(event.line))
    if event.raised:
        parts.append("RAISED")
    return "  ".join(part for part in parts if part)


class LiveLines:
    """Prints each finished node, for ``rg.trace(live=rg.LiveLines("blocks.3*"))``.

    Args:
        pattern: a glob; only nodes whose place, kind, module or parameter it fits are printed.
        file: where to; ``sys.stderr``, as it is at that moment, when left out.
        prefix: what each line begins with, as in ``"rank 1 "``.
    """

    def __init__(self, pattern: str | None = None, file: TextIO | None = None, prefix: str = "") -> None:
        self._wants = make_filter(pattern)
        self._file = file
        self._prefix = prefix

    def __call__(self, event: NodeEvent) -> None:
        file = sys.stderr if self._file is None else self._file
        if file is None or not self._wants(event):
            return
        with contextlib.suppress(OSError, ValueError):  # nobody listens any more, which is no reason to stop training
            print_text(show_plainly(f"{self._prefix}{format_event(event)}", keep=""), file=file)
