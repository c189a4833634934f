"""A trace of backward passes as plain data, written and read."""

from __future__ import annotations

import gzip
import json
import linecache
import os
import shlex
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from retrograd.core.amounts import count_of
from retrograd.core.drawings import drawn_by
from retrograd.core.errors import CannotBundleError, NoSuchNodeError, TraceError
from retrograd.core.files import write_file
from retrograd.core.foreign.text import LARGEST, check_fields, check_kinds, expect_file, parse_object
from retrograd.following.graph.node import Line, NamedNode, TensorInfo, matches
from retrograd.following.graph.origins import ForwardSpan
from retrograd.following.graph.overwritten import Overwritten


@dataclass(frozen=True, slots=True)
class BackwardPass:
    """A run of the engine.

    Attributes:
        number: place among the passes of its trace.
        depth: 0, or how many passes it runs inside of.
        thread: number of the thread that asked for it.
        begin, end: when, on the clock of ``time.perf_counter_ns``.
        failed: whether it raised.
    """

    number: int
    depth: int
    thread: int
    begin: int
    end: int
    failed: bool = False


@dataclass(frozen=True, slots=True)
class NodeEvent(NamedNode):
    """A run of a node.

    Attributes:
        name: kind of the node, as in ``"AddmmBackward0"``.
        number: its sequence number; None for a leaf's.
        module, call: the module call in whose forward it was made; None where that is not known, or outside of all.
        line: source line of the forward that made it.
        parameter: name of the leaf, for a leaf's node.
        run: which pass: index into the trace's ``passes``.
        thread: number of the thread that it ran in.
        begin, end: when, on the clock of ``time.perf_counter_ns``. What lies between two nodes counts for the first.
        incoming, outgoing: what gradients came in, and went out.
        memory: bytes gained while it ran; None where that was not asked for.
        norms_in, norms_out: Euclidean norms of the gradients; None where they were not asked for.
        raised: whether the pass ended in it.
        bundle: folder of its replay bundle, if one was asked for.
    """

    name: str
    number: int | None
    module: str | None
    call: int
    line: Line | None
    parameter: str | None
    run: int
    thread: int
    begin: int
    end: int
    incoming: tuple[TensorInfo | None, ...] = ()
    outgoing: tuple[TensorInfo | None, ...] = ()
    memory: int | None = None
    norms_in: tuple[float | None, ...] | None = None
    norms_out: tuple[float | None, ...] | None = None
    raised: bool = False
    bundle: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A backward pass that ended in an exception.

    Attributes:
        error: the exception's type and message.
        event: the node that had begun last.
        place: which node that is in the order of the pass, from 1, and how many nodes the pass would have run.
        incoming: what came in to it, with how many elements of each are not finite (None: cannot be told).
        before: the nodes that ran before it, the latest first.
        source: where Python code raised, as in ``"hooks.py:12 in damp"``; empty if torch itself did.
        bundle: folder of the replay bundle; None if there is none.
        no_bundle: why there is none.
        overwritten: what the node had saved and something wrote to in place, if that is why it failed.
        had_run: whether the node had run to its end before the pass failed, in a hook of a tensor for one; None where
            that cannot be told: Python code raised that may be a hook, and the node alone does not raise the same.
        hook_on: the gradient whose hook failed then, as in ``"that comes to 0:AddmmBackward0, made at net.py:5"`` or
            ``"of fc.weight"``; empty where it cannot be told, or it was no hook.
    """

    error: str
    event: NodeEvent
    place: tuple[int, int]
    incoming: tuple[tuple[TensorInfo, int | None] | None, ...]
    before: tuple[NodeEvent, ...] = ()
    source: str = ""
    bundle: Path | None = None
    no_bundle: str = ""
    overwritten: Overwritten | None = None
    had_run: bool | None = False
    hook_on: str = ""

    def where(self) -> str:
        """Where it failed, with a hedge where that is not known, as in ``"in fc:AddmmBackward0, node 3 of 11"``."""
        number, count = self.place
        here = f"{self.event.place}, node {number} of {count}"
        if self.had_run:
            return f"{f'in a hook on the gradient {self.hook_on}, ' if self.hook_on else ''}after {here}, had run"
        return f"in {here}{', or in a hook that ran before or after it' if self.had_run is None else ''}"

    def note(self) -> str:
        """The text that is added to the exception."""
        return "\n".join(_tell_failure(self))


class Trace:
    """The nodes that backward passes ran, and the module calls of their forwards.

    Attributes:
        rank: of this process.
        epoch: ``time.time_ns()`` when ``time.perf_counter_ns()`` was 0: add it to get times of day.
        passes: the passes that were traced.
        failure: how the last of them failed; None if it did not.
        pending: what is needed to finish it, where the trace is resumable; it is not saved.
        origins: where nodes were made, for ``rg.walk``; it is not saved either.
        dropped: nodes that ran after the trace was full.
    """

    def __init__(self, rank: int = 0, epoch: int = 0) -> None:
        self.rank = rank
        self.epoch = epoch
        self.passes: list[BackwardPass] = []
        self.failure: Failure | None = None
        self.pending: Any = None
        self.origins: Any = None
        self.dropped = 0
        self._events: list[NodeEvent] = []
        self._forwards: list[ForwardSpan] = []
        self._refresh: Callable[[], None] = nothing_new
        """Brings what was only noted; set while the trace is being made."""

    @property
    def events(self) -> list[NodeEvent]:
        """Events, one for each node that ran, in the order in which they began."""
        self._refresh()
        return self._events

    @property
    def forwards(self) -> list[ForwardSpan]:
        """The module calls of the forwards, as far as origins were recorded."""
        self._refresh()
        return self._forwards

    def find(self, pattern: str) -> list[NodeEvent]:
        """All events whose node a glob matches: by kind, module, ``module:kind`` or the name of the leaf.

        Raises:
            NoSuchNodeError: there is none.
        """
        found = [event for event in self.events if matches(pattern, event)]
        if not found:
            kinds = sorted({event.place for event in self.events})
            raise NoSuchNodeError(
                f"{pattern!r} matches no node of this trace.",
                repair=f"it saw, among others, {', '.join(kinds[:3])}." if kinds else "nothing was traced yet.",
            )
        return found

    def bundle(self, node: NodeEvent | str) -> Path:
        """The replay bundle of a node.

        Args:
            node: its event, or a glob as for :meth:`find`; of several that match, the first that has one.

        Raises:
            NoSuchNodeError: the glob matches none.
            CannotBundleError: none was written.
        """
        events = self.find(node) if isinstance(node, str) else [node]
        found = next((Path(event.bundle) for event in events if event.bundle is not None), None)
        if found is None and self.failure is not None and any(event.raised for event in events):
            found = self.failure.bundle
        if found is None:
            raise CannotBundleError(
                f"No replay bundle of {events[0].place} was written.",
                repair="ask for it before the pass: rg.trace(bundle=…); or call rg.write_bundle(…) in time.",
                reason="a backward pass frees what its nodes have saved.",
            )
        return found

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the trace as JSON lines, packed by gzip; returns its path."""
        head = {
            "retrograd": "trace",
            "rank": self.rank,
            "epoch": self.epoch,
            "dropped": self.dropped,
            "passes": [asdict(each) for each in self.passes],
            "failure": _write_failure(self.failure),
        }
        with write_file(path) as target, gzip.GzipFile(fileobj=target, mode="wb", compresslevel=4) as file:
            for content in (head, *map(asdict, self.forwards), *map(_write_event, self.events)):
                file.write(json.dumps(content, separators=(",", ":")).encode() + b"\n")
        return Path(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a trace that was saved.

        Raises:
            TraceError: the file is not a trace, or is damaged.
        """
        try:
            head, *rows = _read_lines(expect_file(path))
            check_kinds(head, {"rank": int, "epoch": float, "dropped": int})
            trace = cls(head["rank"], head["epoch"])
            trace.dropped = head["dropped"]
            trace.passes = [BackwardPass(**each) for each in head["passes"]]
            trace.failure = _read_failure(head["failure"])
            trace._forwards = [ForwardSpan(**row) for row in rows if "name" not in row]
            trace._events = [_read_event(row) for row in rows if "name" in row]
            _check(trace)
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError, zlib.error) as error:
            raise TraceError(
                f"{str(path)!r} holds no trace that can be read: {error}",
                repair="give a file that Trace.save() or `retrograd trace` has written.",
            ) from error
        return trace

    _repr_html_ = drawn_by("retrograd.following.views.notebook", "draw_trace")

    def __repr__(self) -> str:
        failed = ", the last one failed" if self.failure is not None else ""
        passes = count_of(len(self.passes), "backward pass", "backward passes")
        return f"<Trace of {count_of(len(self.events), 'node')} in {passes}{failed}>"


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a packed file, one a line, which may unpack to so much and no more."""
    left = LARGEST
    with gzip.open(path, "rb") as file:
        while line := file.readline(left + 1):
            left -= len(line)
            if left < 0:
                raise ValueError(f"it unpacks to more than {LARGEST} bytes")
            yield parse_object(line)


def _check(trace: Trace) -> None:
    for each in (*trace.passes, *trace._forwards, *trace._events):
        check_fields(each)
    if any(not 0 <= event.run < len(trace.passes) for event in trace._events):
        raise ValueError("a node ran in a pass that is not there")


def nothing_new() -> None:
    """Do nothing: the trace is complete."""


def _tell_failure(failure: Failure) -> Iterator[str]:
    event = failure.event
    yield f"retrograd: backward failed {failure.where()}"
    if failure.overwritten is not None:
        yield f"  {failure.overwritten.sentence()}"
        yield f"  repair: {failure.overwritten.repair()}"
    if failure.source:
        yield f"  raised by Python code: {failure.source}"
    if event.module is not None and event.call > 1:
        yield f"  call {event.call} of {event.module}"
    if event.line is not None and not failure.hook_on:
        is_text = Path(event.line.file).is_file()  # a trace of somebody else may name a device
        text = linecache.getline(event.line.file, event.line.line).strip() if is_text else ""
        yield f"  forward: {event.line}" + (f": {text}" if text else "")
    for slot, incoming in enumerate(() if failure.had_run else failure.incoming):
        if incoming is not None:
            info, bad = incoming
            yield f"  incoming {slot}: {info}" + ("" if bad is None else f", {bad} of its elements are not finite")
    if failure.before:
        yield f"  ran before it: {', '.join(each.place for each in failure.before)}"
    if failure.bundle is not None:
        yield f"  run it again: retrograd replay {shlex.quote(str(failure.bundle))}"
    elif failure.no_bundle:
        yield f"  no replay bundle: {failure.no_bundle}"


def _write_event(event: NodeEvent) -> dict[str, Any]:
    content = {name: getattr(event, name) for name in NodeEvent.__slots__}  # asdict copies everything, for 90 µs
    content["line"] = event.line and asdict(event.line)
    for name in ("incoming", "outgoing"):
        content[name] = [info and str(info) for info in content[name]]
    return {name: value for name, value in content.items() if value is not None and value is not False}


def _read_event(content: dict[str, Any]) -> NodeEvent:
    line = content.get("line")
    if line is not None:
        check_fields(line := Line(**line))
    content |= {
        "number": content.get("number"),
        "module": content.get("module"),
        "parameter": content.get("parameter"),
        "line": line,
    }
    for name in ("incoming", "outgoing"):
        content[name] = tuple(text and TensorInfo.parse(text) for text in content.get(name, ()))
    for name in ("norms_in", "norms_out"):
        if name in content:
            content[name] = tuple(content[name])
    return NodeEvent(**content)


def _write_failure(failure: Failure | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    return {
        "error": failure.error,
        "event": _write_event(failure.event),
        "place": failure.place,
        "incoming": [each and [str(each[0]), each[1]] for each in failure.incoming],
        "before": [_write_event(each) for each in failure.before],
        "source": failure.source,
        "bundle": str(failure.bundle) if failure.bundle is not None else None,
        "no_bundle": failure.no_bundle,
        "had_run": failure.had_run,
        "hook_on": failure.hook_on,
    }


def _read_failure(content: dict[str, Any] | None) -> Failure | None:
    if content is None:
        return None
    failure = Failure(
        error=content["error"],
        event=_read_event(content["event"]),
        place=(content["place"][0], content["place"][1]),
        incoming=tuple(each and (TensorInfo.parse(each[0]), each[1]) for each in content["incoming"]),
        before=tuple(map(_read_event, content["before"])),
        source=content["source"],
        bundle=Path(content["bundle"]) if content["bundle"] is not None else None,
        no_bundle=content["no_bundle"],
        had_run=content.get("had_run", False),
        hook_on=content.get("hook_on", ""),
    )
    for each in (failure, failure.event, *failure.before):
        check_fields(each)
    return failure
