"""Traces made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrograd.following.graph.node import Line, TensorInfo
from retrograd.following.graph.origins import ForwardSpan
from retrograd.following.tracing.trace import BackwardPass, NodeEvent, Trace

THREAD = 140_000_000_000_001
SMALL = TensorInfo((4, 8), "float32")


def make_trace(
    events: Sequence[NodeEvent] = (),
    passes: Sequence[BackwardPass] = (),
    forwards: Sequence[ForwardSpan] = (),
    *,
    rank: int = 0,
    epoch: int = 1_700_000_000_000_000_000,
) -> Trace:
    """A trace of these."""
    trace = Trace(rank, epoch)
    trace.passes = list(passes)
    trace._events = list(events)
    trace._forwards = list(forwards)
    return trace


def event(name: str, begin: int, end: int, **others: Any) -> NodeEvent:
    """A run of a node, from and to these microseconds."""
    values: dict[str, Any] = {
        "number": 0,
        "module": None,
        "call": 1,
        "line": None,
        "parameter": None,
        "run": 0,
        "thread": THREAD,
        "incoming": (SMALL,),
        "outgoing": (SMALL,),
    }
    return NodeEvent(name=name, begin=begin * 1000, end=end * 1000, **{**values, **others})


def leaf(parameter: str, begin: int, end: int, **others: Any) -> NodeEvent:
    """A run of a leaf's node."""
    others = {"number": None, "parameter": parameter, "outgoing": (), **others}
    return event("AccumulateGrad", begin, end, **others)


def backward(number: int, begin: int, end: int, depth: int = 0, **others: Any) -> BackwardPass:
    """A pass, from and to these microseconds."""
    values = {"thread": THREAD, **others}
    return BackwardPass(number=number, depth=depth, begin=begin * 1000, end=end * 1000, **values)


def call(module: str, begin: int, end: int, numbers: tuple[int, int], nth: int = 1, **others: Any) -> ForwardSpan:
    """A module call, from and to these microseconds, that made nodes of these numbers."""
    values = {"thread": THREAD, **others}
    first, last = numbers
    return ForwardSpan(module=module, call=nth, begin=begin * 1000, end=end * 1000, first=first, last=last, **values)


def invent_trace(**others: Any) -> Trace:
    """Two passes over a model with two blocks; the second one fails in its second node."""
    line = Line("/home/me/model.py", 30, "forward", "softmax")
    memory = {"memory": 2_000_000, "norms_in": (0.5,), "norms_out": (float("nan"),)}
    forwards = [
        call("self", 0, 100, (0, 4)),
        call("blocks.0", 10, 40, (0, 2)),
        call("blocks.1", 50, 90, (2, 4)),
        call("self", 500, 600, (4, 8)),
        call("blocks.0", 510, 540, (4, 6)),
        call("blocks.1", 550, 590, (6, 8)),
    ]
    events = [
        event("MeanBackward0", 200, 210, number=3, module="self"),
        event("SoftmaxBackward0", 210, 290, number=2, module="blocks.1", line=line, **memory),
        event("MulBackward0", 290, 300, number=0, module="blocks.0", outgoing=(SMALL, None)),
        leaf("blocks.0:weight", 300, 320),
        event("MeanBackward0", 700, 710, number=7, module="self", run=1),
        event("SoftmaxBackward0", 710, 750, number=6, module="blocks.1", line=line, run=1, raised=True),
    ]
    passes = [backward(0, 200, 320), backward(1, 700, 750, failed=True)]
    return make_trace(events, passes, forwards, **others)


def invent_nested() -> Trace:
    """A pass inside a node of another, as reentrant checkpointing has it: 100 µs, of which 60 inside."""
    events = [
        event("SumBackward0", 0, 10, number=9, memory=100),
        event("CheckpointFunctionBackward", 10, 100, number=8, memory=1000),
        event("MulBackward0", 30, 50, number=11, run=1, memory=300),
        leaf("self:weight", 50, 90, run=1, memory=500),
    ]
    passes = [backward(0, 0, 100), backward(1, 30, 90, depth=1)]
    return make_trace(events, passes, [call("self", 12, 25, (10, 12), recompute=True)])
