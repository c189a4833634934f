"""Completion of what is being typed at the prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from retrograd.graph.graph import Graph


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
