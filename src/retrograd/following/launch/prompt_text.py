"""The words of the prompt: where a backward pass has stopped, its values, and the ends of what is being typed."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retrograd.following.graph.graph import Graph
from retrograd.following.graph.node import Node, count_nonfinite, norm_of, readable_values
from retrograd.following.graph.walker import describe
from retrograd.following.launch.debugger import DebuggedPass
from retrograd.following.stepping.breakpoints import Stop

_LONGEST_LIST = 60
_LINES_AROUND = 2
_LONGEST = 2000


def describe_pass(stopped: DebuggedPass, *, brief: bool = False) -> Iterator[str]:
    """The node, its source line and gradients, and what was raised; if not brief, the loss and the call as well."""
    stop = stopped.stop
    node = stopped.graph[stop.index]
    state = {"before": "about to run", "after": "just ran", "past": "raised"}[stop.moment]
    yield f"Backward pass {stopped.number} {'raised' if stopped.error else 'stopped'}: {stopped.why}"
    yield f"  node {stop.position + 1} of {len(stopped.graph)}, {state}: {describe_place(node)}"
    for line in describe_source(node):
        yield f"  {line}"
    yield from describe_gradients(stop)
    if stopped.raised_in is not None:
        inner, number = stopped.raised_in
        yield f"  raised at {describe_line(inner.f_code.co_filename, number, inner.f_code.co_name)}"
        for line in describe_lines(inner.f_code.co_filename, number):
            yield f"  {line}"
    if brief:
        return
    yield f"  loss {', '.join(describe_value(root, short=True) for root in stopped.loss)}"
    if stopped.frame is not None:
        code = stopped.frame.f_code
        yield f"  backward() called at {describe_line(code.co_filename, stopped.frame.f_lineno, code.co_name)}"


def describe_gradients(stop: Stop) -> Iterator[str]:
    """Describe what comes into a node, and what goes out of it once it has run."""
    for name, gradients in (("incoming", stop.incoming), ("outgoing", stop.outgoing or ())):
        for slot, gradient in enumerate(gradients):
            if gradient is not None:
                yield f"  {name}[{slot}] {describe_gradient(gradient)}"


def describe_nodes(stopped: DebuggedPass, indices: Sequence[int]) -> Iterator[str]:
    """A line a node: where the pass is, which ones ran, and where they were made."""
    ran = set(stopped.ran)
    for index in indices[:_LONGEST_LIST]:
        mark = "->" if index == stopped.stop.index else "  "
        state = "ran" if index in ran else ""
        yield f"{mark} {state:<4}{describe_place(stopped.graph[index])}"
    if len(indices) > _LONGEST_LIST:
        yield f"   … and {len(indices) - _LONGEST_LIST} more"


# ---- nodes, gradients and values ----


def describe_place(node: Node) -> str:
    """Describe a node, and where in the forward it was made."""
    if node.is_leaf:
        return f"{node.name} of {node.parameter or 'a leaf without a name'}"
    call = f", call {node.call}" if node.call > 1 else ""
    module = f" of {node.module}{call}" if node.module is not None else ""
    line = node.line
    return f"{node.name}{module}" + (f", at {describe_line(line.file, line.line, line.function)}" if line else "")


def describe_line(file: str, line: int, function: str) -> str:
    """A place in the source, with a path from the folder one is in, where that is shorter."""
    path = Path(file)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        file = os.path.relpath(file)
    return f"{file}:{line} in {function}"


def describe_source(node: Node) -> Iterator[str]:
    """The source around the line of the forward that made a node, with an arrow at it."""
    if node.line is not None:
        yield from describe_lines(node.line.file, node.line.line)


def describe_lines(file: str, number: int) -> Iterator[str]:
    """A line of a source file, with an arrow at it, and those around it."""
    for each in range(max(1, number - _LINES_AROUND), number + _LINES_AROUND + 1):
        text = linecache.getline(file, each).rstrip()
        if text or each == number:
            yield f"{'->' if each == number else '  '} {each:>5}  {text}"


def describe_gradient(tensor: Tensor | None) -> str:
    """Describe a tensor: its range and norm, and how much of it is not finite."""
    if tensor is None:
        return "None"
    info = str(describe(tensor))
    values = readable_values(tensor)
    if values is None or not values.numel():
        return info
    bad = count_nonfinite(tensor)
    parts = [info]
    with torch.no_grad():
        if not values.is_complex():
            finite = values[values.isfinite()] if bad else values
            if finite.numel():
                low, high = finite.min().item(), finite.max().item()
                parts.append(f"{low:.4g}" if tensor.numel() == 1 else f"{low:.4g} to {high:.4g}")
    if not bad and tensor.numel() > 1:
        parts.append(f"norm {norm_of([tensor]):.4g}")
    if bad:
        parts.append(f"{bad} of {values.numel()} not finite{_tell_apart(values)}")
    return "  ".join(parts)


def describe_value(value: Any, *, short: bool = False) -> str:
    """A value of any kind."""
    if isinstance(value, Tensor) and short:
        return describe_gradient(value)
    if short and isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value):
        return "; ".join(describe_value(each, short=True) for each in value)
    text = str(value) if isinstance(value, Tensor) else repr(value)
    longest = 80 if short else _LONGEST
    return text if len(text) <= longest else f"{text[:longest]}…"


def _tell_apart(values: Tensor) -> str:
    if values.is_complex():
        return ""
    nans = int(values.isnan().sum())
    infinite = int(values.isinf().sum())
    counts = [f"{nans} nan" if nans else "", f"{infinite} inf" if infinite else ""]
    return f" ({', '.join(filter(None, counts))})"


# ---- completion ----


def list_breakpoints(graph: Graph) -> list[str]:
    """Forms of breakpoints, and the kinds of nodes that there are."""
    kinds = sorted({f"kind {node.name}" for node in graph})
    return ["non-finite", "norm > ", "norm < ", "kind ", "line ", *kinds]


def list_places(graph: Graph) -> list[str]:
    """Nodes and modules."""
    modules = {node.module for node in graph if node.module is not None}
    return sorted({node.place for node in graph} | modules)


def complete_words(text: str, line: str, begin: int, choices: Sequence[str]) -> list[str]:
    """Choose those that continue what was typed after the command; readline replaces only ``text``, the end of it."""
    typed = line[: begin + len(text)].partition(" ")[2].lstrip()
    done = len(typed) - len(text)
    return [choice[done:] for choice in choices if choice.startswith(typed)]


def complete_expression(text: str, typed: str, names: dict[str, Any]) -> list[str]:
    """Names that can be evaluated, or attributes of what stands before the last dot.

    Args:
        text: what readline replaces: the end of what was typed.
        typed: the line up to where one is.
        names: what is known, by its name.
    """
    expression = re.search(r"[\w.]*$", typed)
    owner, dot, start = (expression[0] if expression else "").rpartition(".")
    if not dot:
        return sorted(name for name in names if name.startswith(start))
    try:
        found = dir(eval(owner, names))  # noqa: S307 # what the user types at a debugger
    except Exception:
        return []
    skip = len(start) - len(text) if len(text) <= len(start) else -len(owner) - 1
    return [
        f"{owner}.{name}" if skip < 0 else name[skip:]
        for name in found
        if name.startswith(start) and (start or not name.startswith("_"))
    ]
