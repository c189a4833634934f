"""How large the graph of a loss is, and how many graphs of earlier passes are still held."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch

from retrograd.facts.source import FactHost
from retrograd.history.facts import GraphSize
from retrograd.hooks.engine import is_transformed
from retrograd.hooks.reach import Outline, Sign, outline_graph, sign_node

MOST_NODES = 200_000
"""Beyond it nodes are not counted."""

_FIRST = 8
"""Recorded passes of which every one is looked at."""


class GraphSizes:
    """Watches each recorded pass, and measures graphs at looks and at the first passes. It holds none."""

    def __init__(self, host: FactHost) -> None:
        self._host = host
        self._signs: list[ref[Sign]] = []  # without callbacks, which would run within compiled code
        self._count = self._living = 0

    def measure(self, roots: tuple[torch.Tensor, ...], *, is_wanted: bool) -> Outline | None:
        """A pass begins; returns the outline of its graph, where that is wanted, or it is time."""
        nodes = [node for root in roots if not is_transformed(root) and (node := root.grad_fn) is not None]
        if not nodes or not self._host.is_recorded:
            return None
        self._count += 1
        is_wanted = is_wanted or self._count <= _FIRST or self._host.is_look
        outline = self._measure(nodes) if is_wanted else None
        self._signs.append(ref(sign_node(nodes[0])))
        if len(self._signs) > 2 * self._living + _FIRST:
            self._count_living()
        return outline

    def _count_living(self) -> int:
        """How many graphs are still held; those that are gone are forgotten."""
        self._signs = [sign for sign in self._signs if sign() is not None]
        self._living = len(self._signs)
        return self._living

    def _measure(self, nodes: list[Any]) -> Outline:
        outline = outline_graph(nodes, MOST_NODES)
        self._host.note_fact(GraphSize(value=float(outline.nodes), alive=self._count_living()))
        return outline
