"""Graphs that no walk has found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from retrograd.following.graph.columns import Columns
from retrograd.following.graph.graph import Graph
from retrograd.following.graph.node import Edge, Node


def make_graph(nodes: Iterable[Node], roots: Sequence[Edge]) -> Graph:
    """A graph of these nodes, which must be in order of their index."""
    columns = Columns()
    for node in nodes:
        columns.add(node)
    return Graph(columns, roots)
