"""Nodes, gradients and values in words, one line each."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retrograd.graph.node import Node, count_nonfinite, norm_of, readable_values
from retrograd.graph.walker import describe

_LINES_AROUND = 2
_LONGEST = 2000


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
