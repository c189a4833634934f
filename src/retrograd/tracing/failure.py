"""What is said of a backward pass that raised."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from retrograd.bundles.writer import write_bundle
from retrograd.errors import GraphError
from retrograd.graph.node import TensorInfo
from retrograd.graph.values import count_nonfinite
from retrograd.graph.walker import describe
from retrograd.hooks.nodes import inputs_of, is_freed, is_leaf
from retrograd.tracing.trace import Failure, NodeEvent

_BEFORE = 5
"""How many of the nodes before it are told."""

_ENGINE = "_engine_run_backward"


def describe_failure(
    error: BaseException,
    events: Sequence[NodeEvent],
    count: int,
    incoming: tuple[Tensor | None, ...],
) -> Failure:
    """What can be said of a pass that ended in an exception.

    Args:
        error: the exception.
        events: those of the pass; the last one is of the node that began last.
        count: how many nodes the pass would have run.
        incoming: what came in to the last one.
    """
    return Failure(
        error="".join(traceback.format_exception_only(error)).strip(),
        event=events[-1],
        place=(len(events), count),
        incoming=tuple(map(_examine, incoming)),
        before=tuple(reversed(events[-1 - _BEFORE : -1])),
        source=_find_source(error),
    )


def bundle_node(
    node: Any, incoming: tuple[Tensor | None, ...], make_folder: Callable[[], Path], event: NodeEvent
) -> tuple[Path | None, str]:
    """Write a replay bundle; returns its path, or None and why there is none."""
    if is_leaf(node):
        return None, "a leaf's node only adds to .grad"
    if is_freed(node):
        return None, "an earlier pass has freed what the node had saved; backward(retain_graph=True) keeps it"
    about: dict[str, Any] = {"module": event.module, "call": event.call, "place": event.place}
    if event.line is not None:
        about |= {"file": event.line.file, "line": event.line.line, "function": event.line.function}
    name = "".join(letter if letter.isalnum() or letter in ".#_" else "-" for letter in event.place)
    try:
        return write_bundle(node, incoming, make_folder() / name, about=about), ""
    except (GraphError, OSError) as problem:
        return None, problem.problem if isinstance(problem, GraphError) else str(problem)


def complete_incoming(node: Any, seen: Any) -> tuple[Tensor | None, ...]:
    """One gradient for each that a node takes; the first alone is seen where the others are of no use."""
    known = seen if isinstance(seen, tuple) else (seen,)
    return known + (None,) * (len(inputs_of(node)) - len(known))


def _examine(gradient: Tensor | None) -> tuple[TensorInfo, int | None] | None:
    info = describe(gradient)
    return None if gradient is None or info is None else (info, count_nonfinite(gradient))


def _find_source(error: BaseException) -> str:
    """Where Python code raised that the engine had called: a hook, or the backward of a Function."""
    frames = traceback.extract_tb(error.__traceback__)
    engine = max((index for index, frame in enumerate(frames) if frame.name == _ENGINE), default=len(frames))
    inner = frames[engine + 1 :]
    return f"{inner[-1].filename}:{inner[-1].lineno} in {inner[-1].name}" if inner else ""
