"""A trace as a Chrome trace: JSON that Perfetto (ui.perfetto.dev) and ``chrome://tracing`` open.

A rank is a process in it. A thread's forward module calls, its backward passes and the nodes in them are slices that
nest; an arrow leads from the module call that made a node to the node. The format is that of "Trace Event Format":
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import json
import math
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from retrograd.core.errors import TraceError
from retrograd.core.files import write_file
from retrograd.following.graph.origins import ForwardSpan
from retrograd.following.tracing.trace import BackwardPass, NodeEvent, Trace
from retrograd.following.views.trace_events import name_call, own_memory

_PASS, _NODE, _CALL = range(3)
"""Order in which slices with the same ends enclose each other."""

_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_NAME_OF_LINK = "forward to backward"


def write_chrome_trace(trace: Trace | Iterable[Trace], path: str | os.PathLike[str]) -> Path:
    """Write a trace, or the traces of several ranks side by side, for Perfetto.

    Args:
        trace: one, or several; those of several ranks are set on one clock, the wall clock of each.
        path: a file that ends in ``.json`` or ``.json.gz``.

    Returns:
        The path.

    Raises:
        TraceError: for another ending, for no trace at all, or if the file cannot be written.
    """
    path = Path(path)
    if not path.name.endswith((".json", ".json.gz")):
        raise TraceError(f"{path.name!r} ends neither in .json nor in .json.gz.", repair="give trace.json.gz, say.")
    traces = [trace] if isinstance(trace, Trace) else list(trace)
    if not traces:
        raise TraceError("No trace was given to write.")
    try:
        with write_file(path) as file:
            _write(_list_events(traces), file, zipped=path.suffix == ".gz")
    except OSError as error:
        raise TraceError(f"{str(path)!r} cannot be written: {error.strerror or error}.") from error
    return path


def _write(events: Iterator[dict[str, Any]], file: BinaryIO, *, zipped: bool) -> None:
    out: Any = gzip.GzipFile(fileobj=file, mode="wb", compresslevel=4, mtime=0) if zipped else file
    try:
        out.write(b'{"displayTimeUnit": "ns", "traceEvents": [\n')
        for place, event in enumerate(events):
            out.write(b",\n" * bool(place) + _encode(event).encode())
        out.write(b"\n]}\n")
    finally:
        if zipped:
            out.close()


def _list_events(traces: Sequence[Trace]) -> Iterator[dict[str, Any]]:
    """Names first, then all that happened in the order of time."""
    zero = min((_begin_of(trace) for trace in traces), default=0)
    links, taken = count(1), set[int]()
    timed: list[tuple[int, dict[str, Any]]] = []
    for trace in traces:
        process = next(number for number in count(trace.rank) if number not in taken)
        taken.add(process)
        writer = _Process(trace, process, zero - trace.epoch, links)
        yield from writer.names()
        timed += writer.events()
    timed.sort(key=lambda pair: pair[0])  # a stable order: what begins together stays as it is, the outer slice first
    for _, event in timed:
        yield event


def _begin_of(trace: Trace) -> int:
    """Wall time of the first thing in a trace."""
    things: tuple[Sequence[Any], ...] = (trace.passes, trace.events, trace.forwards)
    return trace.epoch + min((thing.begin for each in things for thing in each), default=0)


@dataclass(slots=True)
class _Slice:
    """Something that lasts, in nanoseconds of the process's clock."""

    begin: int
    end: int
    rank: int
    name: str
    category: str
    details: dict[str, Any] = field(default_factory=dict)
    color: str | None = None


class _Process:
    """The events of one trace.

    Args:
        number: of the process; the rank, where no other trace has taken that.
        zero: where on this trace's clock the written times begin.
        links: numbers for arrows.
    """

    def __init__(self, trace: Trace, number: int, zero: int, links: Iterator[int]) -> None:
        self._trace = trace
        self._number = number
        self._zero = zero
        self._links = links
        threads = [thing.thread for things in (trace.forwards, trace.passes, trace.events) for thing in things]
        self._threads = {thread: place for place, thread in enumerate(dict.fromkeys(threads), 1)}

    def names(self) -> Iterator[dict[str, Any]]:
        """Name process and threads; torch's own numbers of threads are too large for some viewers."""
        yield self._name("process_name", 0, name=f"rank {self._trace.rank}")
        yield self._name("process_sort_index", 0, sort_index=self._number)
        for thread, place in self._threads.items():
            yield self._name("thread_name", place, name=f"thread {place} ({thread:#x})")
            yield self._name("thread_sort_index", place, sort_index=place)

    def events(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Beginnings and events, in no order but that outer slices come before inner ones."""
        by_thread: dict[int, list[_Slice]] = defaultdict(list)
        for run in self._trace.passes:
            by_thread[run.thread].append(_show_pass(run))
        for event in self._trace.events:
            by_thread[event.thread].append(_show_node(event))
        for span in self._trace.forwards:
            by_thread[span.thread].append(_show_call(span))
        for thread, slices in by_thread.items():
            for each in _nest(slices):
                yield self._write_slice(each, thread)
        yield from self._link_calls()
        yield from self._count_memory()

    def _write_slice(self, each: _Slice, thread: int) -> tuple[int, dict[str, Any]]:
        length = {"dur": _print_time(each.end - each.begin)}
        color = {"cname": each.color} if each.color else {}
        begin, event = self._event("X", each.name, each.begin, thread, cat=each.category, args=each.details)
        return begin, {**event, **length, **color}

    def _link_calls(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Arrows from module calls to the nodes they made."""
        calls = _CallFinder(self._trace.forwards)
        for event in self._trace.events:
            call = calls.find(event)
            if call is not None:
                link = {"cat": "link", "id": next(self._links)}
                yield self._event("s", _NAME_OF_LINK, call.begin, call.thread, **link)
                yield self._event("f", _NAME_OF_LINK, event.begin, event.thread, **link, bp="e")

    def _count_memory(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """A curve for what the nodes of a pass have gained so far."""
        if all(event.memory is None for event in self._trace.events):
            return
        starts = [run for run in self._trace.passes if not run.depth]
        changes = [(run.begin, 0, 0) for run in starts]
        pairs = zip(self._trace.events, own_memory(self._trace), strict=True)
        changes += [(event.end, 1, gained) for event, gained in pairs]
        total = 0
        for moment, is_change, gained in sorted(changes):
            total = total + gained if is_change else 0
            yield self._event("C", "memory gained in the pass", moment, None, args={"bytes": total})

    def _event(
        self, kind: str, name: str, moment: int, thread: int | None, **others: Any
    ) -> tuple[int, dict[str, Any]]:
        place = self._threads[thread] if thread is not None else 0
        begin = max(moment - self._zero, 0)
        event = {"ph": kind, "name": name, "pid": self._number, "tid": place, "ts": _print_time(begin)}
        return begin, {**event, **others}

    def _name(self, what: str, thread: int, **name: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": self._number, "tid": thread, "args": name}


class _CallFinder:
    """Finds the module call that made a node."""

    def __init__(self, forwards: Iterable[ForwardSpan]) -> None:
        self._calls: dict[tuple[str, int], dict[int, list[ForwardSpan]]] = defaultdict(lambda: defaultdict(list))
        for span in forwards:
            self._calls[span.module, span.call][span.thread].append(span)
        for threads in self._calls.values():
            for spans in threads.values():
                spans.sort(key=lambda span: span.first)

    def find(self, event: NodeEvent) -> ForwardSpan | None:
        """The innermost call, which the node names, whose numbers hold the node's.

        Each thread counts for itself; of calls in several threads the last one before the node ran is taken.
        """
        number = event.number
        if event.module is None or number is None:
            return None
        found = [
            spans[place - 1]
            for spans in self._calls.get((event.module, event.call), {}).values()
            if (place := bisect_right(spans, number, key=lambda span: span.first))
        ]
        fitting = [span for span in found if number < span.last and span.begin <= event.begin]
        return max(fitting, key=lambda span: span.begin, default=None)


def _show_pass(run: BackwardPass) -> _Slice:
    name = f"backward pass {run.number}{' (inner)' if run.depth else ''}"
    details = {"pass": run.number, "depth": run.depth, "failed": run.failed}
    return _Slice(run.begin, run.end, _PASS, name, "pass", details, "terrible" if run.failed else None)


def _show_call(span: ForwardSpan) -> _Slice:
    category = "recompute" if span.recompute else "forward"
    details = {"call": span.call, "first number": span.first, "last number": span.last - 1}
    return _Slice(span.begin, span.end, _CALL, name_call(span.module, span.call), category, details)


def _show_node(event: NodeEvent) -> _Slice:
    details: dict[str, Any] = {
        "kind": event.name,
        "number": event.number,
        "module": event.module,
        "parameter": event.parameter,
        "line": str(event.line) if event.line else None,
        "operation": (event.line.operation or None) if event.line else None,
        "incoming": _print_each(event.incoming),
        "outgoing": _print_each(event.outgoing),
        "norms in": _print_each(event.norms_in),
        "norms out": _print_each(event.norms_out),
        "memory": event.memory,
        "raised": event.raised or None,
    }
    known = {name: value for name, value in details.items() if value is not None}
    color = "terrible" if event.raised else None
    return _Slice(event.begin, event.end, _NODE, event.place, "backward", known, color)


def _print_each(values: Iterable[Any] | None) -> list[Any] | None:
    """A list that JSON can hold; it knows neither NaN nor infinities."""
    if values is None:
        return None
    return [
        (value if math.isfinite(value) else str(value)) if isinstance(value, float) else value and str(value)
        for value in values
    ]


def _nest(slices: list[_Slice]) -> list[_Slice]:
    """The slices of a thread, outer ones first; one that reaches over the end of another around it is cut there.

    Viewers drop what overlaps without nesting.
    """
    slices.sort(key=lambda each: (each.begin, -each.end, each.rank))
    around: list[_Slice] = []
    for each in slices:
        while around and around[-1].end <= each.begin:
            around.pop()
        each.end = max(each.begin, min([each.end, *(outer.end for outer in around[-1:])]))
        around.append(each)
    return slices


def _print_time(nanoseconds: int) -> float:
    """Microseconds. Perfetto multiplies by 1000 and drops the rest, so a number that is just too small is raised."""
    time = nanoseconds / 1000
    return time if int(time * 1000) >= nanoseconds else math.nextafter(time, math.inf)
