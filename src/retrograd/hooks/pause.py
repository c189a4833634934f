"""A listener before and after every node of a graph, that may stay there, and may change what goes through.

Hooks that the program has set run as ever, and before ours: what ours is given is what the node really gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from retrograd.hooks.engine import uncompiled
from retrograd.hooks.tables import Entry, enter_node

Gradients = tuple[Tensor | None, ...]


class NodeListener(Protocol):
    """Called around each node, in the thread that runs it, by whatever pass comes along. May raise: the pass ends."""

    def before(self, index: int, incoming: Gradients) -> Gradients | None:
        """This node is about to run. What is returned is what it gets instead."""

    def after(self, index: int, outgoing: Gradients) -> Gradients | None:
        """It has run, and has not yet let go of what it had saved. What is returned goes on instead."""


class NodeHooks:
    """Hooks on nodes, until they are removed.

    Args:
        nodes: torch's nodes; the listener is told their place here.
        listener: who is called.
    """

    def __init__(self, nodes: Sequence[Any], listener: NodeListener) -> None:
        self._handles: list[Entry] = []
        before, after = _make_hooks(listener)
        for index, node in enumerate(nodes):
            self._handles.append(enter_node(node.register_prehook, partial(before, index)))
            self._handles.append(enter_node(node.register_hook, partial(after, index)))

    def remove(self) -> None:
        """Take all of them away."""
        while self._handles:
            self._handles.pop().remove()


def _make_hooks(listener: NodeListener) -> tuple[Any, Any]:
    @uncompiled
    def before(index: int, incoming: Gradients) -> Gradients | None:
        return listener.before(index, incoming)

    @uncompiled
    def after(index: int, outgoing: Gradients, incoming: Gradients) -> Gradients | None:
        return listener.after(index, outgoing)

    return before, after
