"""A place in a running backward pass: one node, with what comes in and what goes out."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any, Literal, Protocol

from torch import Tensor

from retrograd.amounts import count_of
from retrograd.errors import StepperError
from retrograd.graph.graph import Graph
from retrograd.graph.node import Node
from retrograd.graph.walker import describe
from retrograd.hooks.node_tap import NodeGradients
from retrograd.hooks.nodes import edges_of, inputs_of, is_saved_tensor, peek, saved_of

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
    """

    __slots__ = ("__weakref__", "_changes", "_owner", "incoming", "index", "moment", "outgoing", "position", "taken")

    def __init__(self, owner: GraphOwner, index: int, position: int, incoming: NodeGradients) -> None:
        self._owner = owner
        self.index = index
        self.position = position
        self.incoming = incoming
        self.outgoing: NodeGradients | None = None
        self.moment: Moment = "before"
        self.taken: NodeGradients | None = None
        """What the node gets instead of what came in, where that was set."""
        self._changes: tuple[Change, ...] | None = None

    def __repr__(self) -> str:
        return f"<Stop {self.moment} {self.node.place}, after {self.position} nodes>"

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

    @property
    def changes(self) -> tuple[Change, ...] | None:
        """The gradients that go on instead of what the node gives, where that was set."""
        return self._changes

    def set_incoming(self, *gradients: Change) -> None:
        """Let the node get these gradients instead, as if a hook before the node had returned them.

        Args:
            *gradients: one for each of ``incoming``, of the same shape, dtype and device; ``...`` for what came in.

        Raises:
            StepperError: the node has run already, or these gradients do not fit.
        """
        if self.moment != "before":
            raise StepperError(
                f"{self.node.place} has run already.",
                repair="set what comes in where the pass stops before it.",
            )
        _check(gradients, inputs_of(self.live), len(self.incoming), f"{self.node.place} takes")
        self.incoming = self.taken = _apply(gradients, self.incoming)

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
            self.outgoing = _apply(gradients, self.outgoing)
        self._changes = gradients


def apply_changes(changes: Sequence[Change] | None, gradients: NodeGradients) -> NodeGradients:
    """Gradients with some of them replaced."""
    return gradients if changes is None else _apply(changes, gradients)


def _apply(changes: Sequence[Change], gradients: NodeGradients) -> NodeGradients:
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
