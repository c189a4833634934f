"""Stops in a running backward pass, and breakpoints as a person writes them.

A stop is at one node, with its gradients that come in and go out. The breakpoints:

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
from types import EllipsisType
from typing import Any, Literal, Protocol

from torch import Tensor

from retrograd.core.amounts import count_of
from retrograd.core.errors import NoSuchNodeError, PatternError, StepperError
from retrograd.core.hooks.node_tap import NodeGradients
from retrograd.core.hooks.nodes import edges_of, inputs_of, is_saved_tensor, peek, saved_of
from retrograd.following.graph.graph import Graph
from retrograd.following.graph.node import Line, Node, holds_nonfinite, matches, norm_of
from retrograd.following.graph.walker import describe

Change = Tensor | EllipsisType | None
"""A gradient, or ``...`` for the one that is there."""

Moment = Literal["before", "after", "past"]


class GraphOwner(Protocol):
    """The owner of the graph of a pass."""

    @property
    def graph(self) -> Graph:
        """The graph; only data when the pass is over."""


class Stop:
    """A node of a backward pass that is paused at it.

    It remains what it was when the pass has gone on, and holds the gradients that it has shown for as long as somebody
    holds it.

    Attributes:
        index: index of the node in the graph.
        position: how many nodes of the pass have run before it.
        incoming: the gradients that it gets, one for each result of its operation in the forward; None where there is
            none. A tensor that is changed in place changes what the node gets.
        outgoing: what it has given, one for each of its edges; None as long as it has not run.
        moment: ``"before"`` the node runs, ``"after"``, or ``"past"`` when the pass has gone on.
        changes: the gradients that go on instead of what the node gives, where that was set.
    """

    __slots__ = ("__weakref__", "_owner", "changes", "incoming", "index", "moment", "outgoing", "position", "taken")

    def __init__(self, owner: GraphOwner, index: int, position: int, incoming: NodeGradients) -> None:
        self._owner = owner
        self.index = index
        self.position = position
        self.incoming = incoming
        self.outgoing: NodeGradients | None = None
        self.moment: Moment = "before"
        self.taken: NodeGradients | None = None
        """Gradients that the node gets instead of those that came in, where that was set."""
        self.changes: tuple[Change, ...] | None = None

    def __repr__(self) -> str:
        return f"<Stop {self.moment} {self.node.place}, after {count_of(self.position, 'node')}>"

    @property
    def node(self) -> Node:
        """The node, as plain data."""
        return self._owner.graph[self.index]

    @property
    def live(self) -> Any:
        """Torch's own node, as ``tensor.grad_fn`` gives it.

        Raises:
            DetachedGraphError: the pass is over.
        """
        return self._owner.graph.live(self.index)

    @property
    def saved(self) -> dict[str, Any]:
        """The values that the operation saved for its backward: name → tensor, list of tensors, or plain value.

        Nothing is unpacked: a tensor that hooks have packed into something else, or that is freed, is None. The tensors
        share memory with what is saved.

        Raises:
            DetachedGraphError: the pass is over.
        """
        return {name: _show(value) for name, value in saved_of(self.live).items()}

    def set_incoming(self, *gradients: Change) -> None:
        """Let the node get these gradients instead, as if a hook before the node had returned them.

        Args:
            *gradients: one for each of ``incoming``, of the same shape, dtype and device; ``...`` for what came in.

        Raises:
            StepperError: the node has run already, or these gradients do not fit.
        """
        if self.moment != "before":
            raise StepperError(
                f"{self.node.place} has run already.", repair="set what comes in where the pass stops before it."
            )
        _check(gradients, inputs_of(self.live), len(self.incoming), f"{self.node.place} takes")
        self.incoming = self.taken = apply_changes(gradients, self.incoming)

    def set_outgoing(self, *gradients: Change) -> None:
        """Let these gradients go on, whatever the node gives.

        Args:
            *gradients: one for each edge of the node; None where nobody wants one; ``...`` for what the node gives.

        Raises:
            StepperError: the pass has gone on, or these gradients do not fit.
        """
        if self.moment == "past":
            raise StepperError(
                f"The pass has gone on from {self.node.place}.",
                repair="set what goes out while the pass is stopped at the node.",
            )
        edges = edges_of(self.live)
        takers = [inputs_of(node)[slot] if node is not None else None for node, slot in edges]
        _check(gradients, takers, len(edges), f"{self.node.place} gives")
        if self.outgoing is not None:
            self.outgoing = apply_changes(gradients, self.outgoing)
        self.changes = gradients


def apply_changes(changes: Sequence[Change] | None, gradients: NodeGradients) -> NodeGradients:
    """Gradients with some of them replaced."""
    if changes is None:
        return gradients
    return tuple(old if new is ... else new for new, old in zip(changes, gradients, strict=True))


def _check(gradients: Sequence[Change], wanted: Sequence[Any], count: int, who: str) -> None:
    if len(gradients) != count:
        raise StepperError(
            f"{who} {count_of(count, 'gradient')}, not {len(gradients)}.",
            repair="give None where there is no gradient.",
        )
    for slot, (gradient, metadata) in enumerate(zip(gradients, wanted, strict=False)):
        if gradient is None or gradient is ...:
            continue
        if not isinstance(gradient, Tensor):
            kind = type(gradient).__name__
            raise StepperError(f"Gradient {slot} is not a tensor, but {kind}.", repair="give a tensor.")
        if metadata is None:
            raise StepperError(f"Nobody takes gradient {slot}.", repair=f"give None for gradient {slot}.")
        if describe(gradient) != describe(metadata):
            raise StepperError(
                f"Gradient {slot} is {describe(gradient)}, but {who} {describe(metadata)} there.",
                repair="reshape or convert it, as with gradient.to(dtype), .sum_to_size(shape) or .expand(shape).",
            )


def _show(value: Any) -> Any:
    if isinstance(value, list | tuple) and any(map(is_saved_tensor, value)):
        return [_show(each) for each in value]
    return peek(value) if is_saved_tensor(value) else value


# ---- breakpoints ----

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
        """Return the test for the stops of one graph: its nodes are examined once.

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
