"""Graphs that no walk has found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from retrograd.graph.columns import Columns
from retrograd.graph.graph import Graph
from retrograd.graph.node import Edge, Node


def make_graph(nodes: Iterable[Node], roots: Sequence[Edge]) -> Graph:
    """A graph of these nodes, which must be in order of their index."""
    columns = Columns()
    for node in nodes:
        columns.add(node)
    return Graph(columns, roots)
