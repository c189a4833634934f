"""A trace as a table: where time and memory went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TextIO, get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from retrograd.core.amounts import count_of, show_bytes
from retrograd.core.errors import TraceError
from retrograd.core.sites.site import parse_leniently
from retrograd.core.views.terminal import can_print, giving_text, make_table, open_console, print_name, print_share
from retrograd.following.graph.node import shorten_line
from retrograd.following.tracing.trace import NodeEvent, Trace
from retrograd.following.views.trace_events import choose_events, largest, own_memory, own_times, print_flow, print_norm

By = Literal["node", "module", "kind"]
Measure = Literal["time", "memory"]

_NO_MODULE = "(no module)"


def print_trace(
    trace: Trace,
    *,
    by: By = "node",
    sort: Measure = "time",
    nodes: str | None = None,
    limit: int | None = 20,
    file: TextIO | None = None,
) -> None:
    """Print what took most of the time of the backward passes, or gained most memory.

    A line stands for all runs of the nodes that have the same place and source line, or module, or kind. Time spent in
    a pass inside a node (reentrant checkpointing) counts for that pass's nodes; a share is one of the whole time of
    the outermost passes. Where several threads run nodes, shares may add up to more than 100 %. The node that
    raised is marked with ``!`` and is always there.

    Args:
        trace: as made by ``rg.trace()``, or loaded.
        by: what makes a line: ``node``, ``module`` or ``kind``.
        sort: ``time``, or ``memory``: the most that was gained in one pass.
        nodes: a glob; only nodes whose place, kind, module or parameter it fits.
        limit: how many lines; None for all.
        file: where to print; standard output when left out.

    Raises:
        TraceError: for an unknown order or grouping, or if memory is asked for and was not traced.
        NoSuchNodeError: for a pattern that matches no node; the nearest are named.
    """
    _check("by", by, get_args(By))
    _check("sort", sort, get_args(Measure))
    has_memory = any(event.memory is not None for event in trace.events)
    if sort == "memory" and trace.events and not has_memory:
        raise TraceError("This trace has no memory in it.", repair="trace with rg.trace(memory=True).")
    chosen = choose_events(trace.events, nodes)
    lines = _gather(trace, chosen, by)
    lines.sort(key=lambda line: line.time if sort == "time" else line.memory, reverse=True)
    shown = [line for place, line in enumerate(lines) if limit is None or place < limit or line.raised]
    console = open_console(file)
    console.print(_describe(trace, len(chosen)), style="dim")
    for text in _tell_failures(trace):
        console.print(Text(print_name(console, text)), style="bold red")
    if shown:
        console.print(_tabulate(console, shown, by, _outermost_time(trace), has_memory))
    if len(lines) > len(shown):
        console.print(f"and {len(lines) - len(shown):,} more", style="dim")


format_trace = giving_text(print_trace)


@dataclass(slots=True)
class _Group:
    """Some events together; times in nanoseconds.

    Attributes:
        slowest: the event that took longest.
        memory: the most they gained in one pass, in bytes.
        norms: largest norm that came in, and went out; -1 where none is known.
    """

    name: str
    slowest: NodeEvent
    runs: int = 0
    time: int = 0
    longest: int = -1
    memory: int = 0
    norms: tuple[float, float] = (-1.0, -1.0)
    raised: bool = False
    gained: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, event: NodeEvent, time: int, memory: int) -> None:
        self.runs += 1
        self.time += time
        self.gained[event.run] += memory
        self.memory = max(self.gained.values())
        self.raised |= event.raised
        self.norms = (
            largest([self.norms[0], *(event.norms_in or ())]),
            largest([self.norms[1], *(event.norms_out or ())]),
        )
        if time > self.longest:
            self.slowest, self.longest = event, time


def _gather(trace: Trace, chosen: Sequence[int], by: By) -> list[_Group]:
    times, memory = own_times(trace), own_memory(trace)
    name_of = _NAMES[by]
    lines: dict[tuple[str, str], _Group] = {}
    for index in chosen:
        event = trace.events[index]
        name = name_of(event)
        key = (name, str(event.line) if by == "node" else "")
        if key not in lines:
            lines[key] = _Group(name, event)
        lines[key].add(event, times[index], memory[index])
    return list(lines.values())


def _module_of(event: NodeEvent) -> str:
    if event.module is None and event.parameter is not None:
        return parse_leniently(event.parameter).path
    return event.module or _NO_MODULE


def _place_of(event: NodeEvent) -> str:
    return event.place


def _kind_of(event: NodeEvent) -> str:
    return event.name


_NAMES: dict[By, Callable[[NodeEvent], str]] = {"node": _place_of, "module": _module_of, "kind": _kind_of}


def _describe(trace: Trace, chosen: int) -> str:
    """The line on top."""
    count, outermost = len(trace.events), sum(not run.depth for run in trace.passes)
    inner = len(trace.passes) - outermost
    parts = [
        f"{count_of(outermost, 'pass', 'passes')}{f' and {inner:,} inside of them' if inner else ''}",
        count_of(count, "node"),
        f"{chosen:,} of them chosen" if chosen < count else "",
        f"{trace.dropped:,} more not kept" if trace.dropped else "",
        f"{_outermost_time(trace) / 1e6:,.1f} ms",
    ]
    return f"rank {trace.rank}: " * bool(trace.rank) + ", ".join(part for part in parts if part)


def _tell_failures(trace: Trace) -> Iterator[str]:
    failure = trace.failure
    for event in trace.events:
        if event.raised and (failure is None or event.run != failure.event.run):
            line = f", {event.line}" if event.line else ""
            yield f"pass {event.run} raised; the node that began last is {event.place}{line}"
    if failure is not None:
        yield f"pass {failure.event.run} failed {failure.where()}"
        if failure.source:
            yield f"raised by Python code: {failure.source}"
        if failure.bundle is not None:
            yield f"run that node again: retrograd replay {failure.bundle}"


def _outermost_time(trace: Trace) -> int:
    return sum(max(run.end - run.begin, 0) for run in trace.passes if not run.depth)  # one that runs has no end yet


def _tabulate(console: Console, lines: Sequence[_Group], by: By, total: int, has_memory: bool) -> Table:
    arrow = "→" if can_print(console, "→") else "->"
    micro = "µs" if can_print(console, "µs") else "us"
    has_norms = any(max(line.norms) != -1 for line in lines)
    has_lines = by == "node" and any(line.slowest.line for line in lines)
    extra = ["memory"] * has_memory + ["norm in", "norm out"] * has_norms
    numbers = dict.fromkeys(("runs", "ms", "share", f"mean {micro}", *extra), "number")
    columns = {by: "name", **numbers, "gradients": "name", **({"line": "text"} if has_lines else {})}
    rows = []
    for line in lines:
        cells = [
            f"{'! ' if line.raised else ''}{line.name}",
            f"{line.runs:,}",
            f"{line.time / 1e6:,.3f}",
            print_share(line.time / total if total else 0.0),
            f"{line.time / line.runs / 1e3:,.1f}",
        ]
        if has_memory:
            cells.append(show_bytes(line.memory, signed=True))
        if has_norms:
            cells += [print_norm(norm) for norm in line.norms]
        cells.append(print_flow(line.slowest, arrow))
        if has_lines:
            cells.append(shorten_line(line.slowest.line))
        style = "bold red" if line.raised else ""
        rows.append([Text(print_name(console, cell), style=style) for cell in cells])
    return make_table(console, columns, rows)


def _check(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise TraceError(f"{name}={value!r} is not known.", repair=f"give one of {', '.join(known)}.")
