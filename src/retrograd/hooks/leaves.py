"""Leaves of a graph: the tensors that a backward pass finds gradients for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from retrograd.hooks.nodes import edges_of, root_edges, variable_of

MOST_NODES = 1000
"""Nodes that are looked at."""


def find_leaves(roots: Sequence[Tensor], most: int = 8) -> list[Tensor]:
    """Some leaves of the graph behind these tensors, those nearest to them first."""
    waiting = [node for node, _ in root_edges(roots)]
    seen = set(map(id, waiting))
    found: list[Tensor] = []
    for node in waiting:  # which grows
        leaf = variable_of(node)
        if leaf is not None:
            found.append(leaf)
        if len(found) == most or len(waiting) > MOST_NODES:
            break
        fresh = [after for after, _ in edges_of(node) if after is not None and id(after) not in seen]
        seen.update(map(id, fresh))
        waiting += fresh
    return found
