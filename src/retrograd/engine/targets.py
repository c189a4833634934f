"""Where a run of our own engine is to stop, and what arrived there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from retrograd.engine.gradients import Gradients
from retrograd.errors import ReplayError
from retrograd.hooks.nodes import root_edges

Arrived = tuple[Tensor | None, ...]
Edges = tuple[tuple[Any, int], ...]


class LeafGradient(NamedTuple):
    """What has arrived at a leaf."""

    leaf: Tensor
    gradient: Tensor | None


class Targets:
    """What ``to`` names, and what has arrived there."""

    def __init__(self, to: Any) -> None:
        keys = [] if to is None else list(to) if is_several(to) else [to]
        if to is not None and not keys:
            raise ReplayError("`to` names nothing.", repair="give tensors or nodes, or leave it out for all leaves.")
        self._edges = [(key, *root_edges([key])[0]) for key in keys]
        self._arrived: dict[Any, Arrived] = {}
        self.needed: set[Any] = set()
        self.nodes = {node for _, node, _ in self._edges}
        self.are_leaves = all(isinstance(key, Tensor) and key.is_leaf for key in keys)
        self.leaves = {id(key) for key in keys if isinstance(key, Tensor) and key.is_leaf}

    def __bool__(self) -> bool:
        return bool(self._edges)

    def want(self, node: Any) -> bool:
        """Whether what goes to this node is of interest."""
        return not self._edges or node in self.needed or node in self.nodes

    def record(self, node: Any, arrived: Arrived) -> None:
        if node in self.nodes:
            self._arrived[node] = arrived

    def find_needed(self, edges: Mapping[Any, Edges]) -> None:
        """Find the nodes that lead to one of them: only those must run.

        Args:
            edges: of every node of the graph.
        """
        before: dict[Any, list[Any]] = {}
        for node, leading in edges.items():
            for following, _ in leading:
                if following is not None:
                    before.setdefault(following, []).append(node)
        queue = list(self.nodes)
        for node in queue:  # grows while it is walked
            for earlier in before.get(node, ()):
                if earlier not in self.needed:
                    self.needed.add(earlier)
                    queue.append(earlier)

    def collect(self, leaves: dict[int, LeafGradient]) -> Gradients:
        return Gradients([(key, self._value(key, node, slot, leaves)) for key, node, slot in self._edges])

    def _value(self, key: Any, node: Any, slot: int, leaves: dict[int, LeafGradient]) -> Any:
        if id(key) in self.leaves:
            return leaves.get(id(key), LeafGradient(key, None)).gradient
        arrived = self._arrived.get(node)
        if arrived is None or key is node:
            return arrived
        return arrived[slot]


def is_several(given: Any) -> bool:
    """Whether this is a list of tensors, nodes and gradient edges, and not one of them."""
    return isinstance(given, list | tuple) and not isinstance(given, GradientEdge)
