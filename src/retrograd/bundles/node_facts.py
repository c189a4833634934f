"""What a bundle tells of a live node."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from retrograd.bundles.contents import Came, NodeFacts, NodeFailure
from retrograd.bundles.program import describe_error
from retrograd.bundles.recorder import Recorded
from retrograd.graph.node import Line, Saved
from retrograd.graph.values import count_nonfinite
from retrograd.graph.walker import describe
from retrograd.hooks.dispatch import attributes_of
from retrograd.hooks.nodes import is_leaf, is_python, name_of, number_of, peek, saved_of

AROUND = 3
"""Source lines kept before and behind the line of the forward."""

_LONGEST = 200


def describe_node(
    node: Any, incoming: Sequence[Tensor | None], recorded: Recorded, about: Mapping[str, Any]
) -> NodeFacts:
    """Everything about a node, besides what is needed to run it.

    Args:
        node: the node.
        incoming: what came in.
        recorded: its run.
        about: what somebody else knows of it.
    """
    about = dict(about)
    line = _take_line(about)
    module, parameter = about.pop("module", None), about.pop("parameter", None)
    return NodeFacts(
        name=name_of(node),
        number=None if is_leaf(node) else number_of(node),
        incoming=tuple(map(_describe_came, incoming)),
        saved=describe_saved(node),
        attributes=describe_attributes(node),
        failure=None if recorded.error is None else _describe_failure(node, recorded, recorded.error),
        module=module,
        call=int(about.pop("call", 1)),
        parameter=parameter,
        line=line,
        source=() if line is None else _read_source(line),
        about=about,
    )


def _describe_came(tensor: Tensor | None) -> Came | None:
    info = describe(tensor)
    return None if tensor is None or info is None else Came(info, count_nonfinite(tensor))


def _describe_failure(node: Any, recorded: Recorded, error: Exception) -> NodeFailure:
    by = "operation" if recorded.is_operations else "Python" if is_python(node) else "autograd"
    return NodeFailure(describe_error(error), by, "".join(traceback.format_exception(error)))


def _take_line(about: dict[str, Any]) -> Line | None:
    """The line of the forward, in whichever way it was told."""
    match about.pop("line", None):
        case Line() as line:
            return line
        case int(number) if "file" in about:
            function, operation = about.pop("function", ""), about.pop("operation", "")
            return Line(str(about.pop("file")), number, str(function), str(operation))
        case None:
            return None
        case other:
            about["line"] = other
            return None


def _read_source(line: Line) -> tuple[tuple[int, str], ...]:
    numbers = range(max(1, line.line - AROUND), line.line + AROUND + 1)
    found = ((number, linecache.getline(line.file, number).rstrip("\n")) for number in numbers)
    return tuple((number, text) for number, text in found if text or number == line.line)


def describe_saved(node: Any) -> tuple[Saved, ...]:
    """The tensors that a node keeps, and how often each has been written to."""
    return tuple(_describe(name, peek(value)) for name, value in _flatten(saved_of(node)) if _is_saved(value))


def describe_attributes(node: Any) -> dict[str, str]:
    """What a node keeps besides tensors, as text."""
    found = [*_flatten(saved_of(node)), *_flatten(attributes_of(node))]
    return {name: _print(value) for name, value in found if not _is_saved(value) and not _is_tensor(value)}


def tensors_of(node: Any) -> dict[str, Tensor]:
    """The tensors that a node keeps, as far as they can be told without running hooks, by names for a bundle."""
    saved = {f"saved.{name}": peek(value) for name, value in _flatten(saved_of(node)) if _is_saved(value)}
    others = {f"context.{name}": value for name, value in _flatten(attributes_of(node)) if _is_tensor(value)}
    return {name: tensor for name, tensor in (saved | others).items() if tensor is not None}


def _describe(name: str, tensor: Tensor | None) -> Saved:
    if tensor is None:
        return Saved(name, value="not to be told: None, or packed by hooks")
    version = None if tensor.is_inference() else tensor._version
    return Saved(name, describe(tensor), version=version)


def _flatten(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, list | tuple) and any(_is_saved(part) or _is_tensor(part) for part in value):
            yield from ((f"{name}[{index}]", part) for index, part in enumerate(value))
        else:
            yield name, value


def _is_saved(value: Any) -> bool:
    return type(value).__name__ == "SavedTensor"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _print(value: Any) -> str:
    try:
        return repr(value)[:_LONGEST]
    except Exception as error:  # it is the user's
        return f"{type(value).__name__}, whose repr raises {type(error).__name__}"
