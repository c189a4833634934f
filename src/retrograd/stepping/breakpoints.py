"""Breakpoints in a backward pass, as a person writes them.

non-finite              a gradient that comes in holds NaN or infinity
norm > 100              the Euclidean norm of all that comes in; also >=, <, <=
kind MulBackward0       nodes of one kind; a glob too
line model.py:30        nodes that this line of the forward made
blocks.3*               a glob over places: module, ``module:kind``, kind, or name of a leaf
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePath

from torch import Tensor

from retrograd.errors import NoSuchNodeError, PatternError
from retrograd.graph.graph import Graph
from retrograd.graph.node import Line, Node, holds_nonfinite, matches, norm_of
from retrograd.hooks.node_tap import NodeGradients
from retrograd.stepping.stop import Stop

FORMS = ("non-finite", "norm > 100", "kind MulBackward0", "line model.py:30", "a glob such as 'blocks.3*'")

_NORM = re.compile(r"norm\s*(>=|<=|>|<)\s*(\S+)")
_LINE = re.compile(r"line\s+(\S.*):(\d+)")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}

Predicate = Callable[[Stop], bool]
"""A question asked at a node, in the thread that runs it."""


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A question asked before each node runs, and answered by the node's place or by what comes in.

    Attributes:
        text: the question as it was written.
        asks_place: of a node; None for a question about values.
        asks_values: of gradients; None for a question about places.
    """

    text: str
    asks_place: Callable[[Node], bool] | None = None
    asks_values: Callable[[NodeGradients], bool] | None = None

    def __call__(self, stop: Stop) -> bool:
        if self.asks_place is not None:
            return self.asks_place(stop.node)
        return self.asks_values is not None and self.asks_values(stop.incoming)

    def __str__(self) -> str:
        return self.text

    def within(self, graph: Graph) -> Predicate:
        """Ask the question of the stops of one graph: its nodes are looked at once.

        Raises:
            NoSuchNodeError: it is about places, and no node is there; the nearest are named.
        """
        if self.asks_place is None:
            return self
        found = frozenset(node.index for node in graph if self.asks_place(node))
        if not found:
            self._complain(graph)
        return lambda stop: stop.index in found

    def _complain(self, graph: Graph) -> None:
        line = _LINE.fullmatch(self.text)
        if line is None:
            graph.find(self.text.removeprefix("kind "))
        known = {node.line.line for node in graph if line and node.line and _is_file(node.line.file, line[1])}
        repair = (
            f"that file made nodes at lines {', '.join(map(str, sorted(known)[:20]))}."
            if known
            else "record where nodes are made: with rg.record_origins(): loss = model(x)"
        )
        raise NoSuchNodeError(f"{self.text!r} matches no node.", repair=repair)


def parse_breakpoint(text: str) -> Breakpoint:
    """Read a breakpoint.

    Raises:
        PatternError: the text has none of the forms.
    """
    text = " ".join(text.split())
    if text in ("non-finite", "nonfinite"):
        return Breakpoint("non-finite", asks_values=holds_nonfinite)
    if match := _NORM.fullmatch(text):
        return Breakpoint(text, asks_values=_compare_norm(text, match[1], match[2]))
    if match := _LINE.fullmatch(text):
        file, line = match[1], int(match[2])
        return Breakpoint(text, lambda node: _is_line(node.line, file, line))
    if text.startswith("kind ") and " " not in text[5:]:
        kind = text[5:]
        return Breakpoint(text, lambda node: fnmatchcase(node.name, kind))
    if not text or " " in text or text in ("norm", "kind", "line") or re.match(r"norm\W|line:", text):
        raise _no_breakpoint(text)
    return Breakpoint(text, lambda node: matches(text, node))


def _compare_norm(text: str, sign: str, limit: str) -> Callable[[NodeGradients], bool]:
    try:
        bound = float(limit)
    except ValueError:
        raise _no_breakpoint(text) from None
    compare = _COMPARE[sign]

    def ask(incoming: Sequence[Tensor | None]) -> bool:
        norm = norm_of(incoming)
        return norm is not None and compare(norm, bound)

    return ask


def _is_line(place: Line | None, file: str, line: int) -> bool:
    return place is not None and place.line == line and _is_file(place.file, file)


def _is_file(path: str, asked: str) -> bool:
    """``model.py`` and ``net/model.py`` both mean ``/home/me/net/model.py``."""
    wanted = PurePath(asked).parts
    return PurePath(path).parts[-len(wanted) :] == wanted


def _no_breakpoint(text: str) -> PatternError:
    return PatternError(f"{text!r} is not a breakpoint.", repair=f"write one of: {'; '.join(FORMS)}.")
