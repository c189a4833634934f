"""A backward graph as plain data: it saves, loads and compares.

The order in which the engine runs its nodes follows from it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

from retrograd.core.amounts import count_of
from retrograd.core.drawings import drawn_by
from retrograd.core.errors import DetachedGraphError, NoSuchNodeError
from retrograd.core.hooks.nodes import LEAF_NUMBER
from retrograd.following.graph.columns import Columns
from retrograd.following.graph.node import Edge, Node, matches


class Graph:
    """The nodes that a backward pass from some roots can reach.

    A graph is a sequence of :class:`Node`; the first ones are those at the roots. It holds no tensor. One that comes
    from ``rg.walk`` also knows torch's own nodes, see :meth:`live`, until it is saved or :meth:`detach` is called.

    Two graphs are equal when their nodes are, but for the sequence numbers, which no two forwards share.

    Attributes:
        roots: where it begins.
    """

    def __init__(self, columns: Columns, roots: Sequence[Edge], live: Sequence[Any] = ()) -> None:
        self._columns = columns
        self._live = live
        self.roots = tuple(roots)

    def __len__(self) -> int:
        return len(self._columns.names)

    def __getitem__(self, index: int) -> Node:
        return self._columns.node(range(len(self))[index])

    def __iter__(self) -> Iterator[Node]:
        return map(self._columns.node, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Graph):
            return NotImplemented
        return self.roots == other.roots and self._columns.contents() == other._columns.contents()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        leaves = sum(number is None for number in self._columns.numbers)
        return f"<Graph of {count_of(len(self), 'node')}, {count_of(leaves, 'leaf', 'leaves')} among them>"

    _repr_html_ = drawn_by("retrograd.following.views.notebook", "draw_graph")

    def order(self) -> list[int]:
        """Indices in the order in which the engine runs them: those made last first, leaves as soon as they can.

        What other threads have made is numbered apart, and the engine compares the numbers as they are.
        """
        return order_of_run(self._columns.numbers, self._columns.edges, self.roots)

    def find(self, pattern: str) -> list[Node]:
        """All nodes that a glob matches: by kind, by module, by ``module:kind``, or by the name of the leaf.

        Raises:
            NoSuchNodeError: there is none; the nearest are named.
        """
        found = [node for node in self if matches(pattern, node)]
        if not found:
            raise NoSuchNodeError(f"{pattern!r} matches no node.", repair=_nearest(pattern, self))
        return found

    def live(self, node: int | Node) -> Any:
        """Torch's own node.

        Raises:
            DetachedGraphError: this graph is only data.
        """
        if not self._live:
            raise DetachedGraphError(
                "This graph is data alone: torch's own nodes are not part of it.",
                repair="walk again: rg.walk(loss).live(node).",
                reason="a graph that was loaded or detached keeps nothing of the program alive.",
            )
        return self._live[node.index if isinstance(node, Node) else node]

    def detach(self) -> Graph:
        """Let go of torch's own nodes; returns the graph itself."""
        self._live = ()
        return self

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the graph as a Parquet file, one row a node; returns its path."""
        from retrograd.following.graph.stored import write_graph

        return write_graph(path, self._columns, self.roots)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Graph:
        """Read a graph that was saved.

        Raises:
            GraphError: the file is none, or is damaged.
        """
        from retrograd.following.graph.stored import read_graph

        return cls(*read_graph(path))


def _nearest(pattern: str, graph: Graph) -> str:
    places = sorted({name for node in graph for name in (node.place, node.name, node.module) if name is not None})
    near = difflib.get_close_matches(pattern, places, n=3, cutoff=0.4)
    return f"the nearest are {', '.join(near)}." if near else f"the first ones are {', '.join(places[:3])}."


T = TypeVar("T")


def order_of_run(
    numbers: Sequence[int | None], edges: Sequence[Iterable[Edge | None]], roots: Sequence[Edge]
) -> list[int]:
    """Order nodes as the engine runs them: of those that are ready the one with the largest number, leaves first.

    Numbers count within each thread, and the engine compares those of several threads as they are. Where nodes are on
    several devices, this is the order of each of them.

    Args:
        numbers: of each node; None for a leaf's.
        edges: of each node, where its gradients go.
        roots: where the pass begins.

    Returns:
        Places of the nodes.
    """
    waiting = [0] * len(numbers)
    for edge in chain(roots, chain.from_iterable(edges)):
        if edge is not None:
            waiting[edge.node] += 1
    ready = ReadyQueue[int]()
    order: list[int] = []
    targets: Iterable[Edge | None] = roots
    while True:
        for edge in targets:
            if edge is not None:
                waiting[edge.node] -= 1
                if not waiting[edge.node]:
                    number = numbers[edge.node]
                    ready.push(LEAF_NUMBER if number is None else number, edge.node)
        if not ready:
            return order
        order.append(ready.pop())
        targets = edges[order[-1]]


class ReadyQueue(Generic[T]):
    """Nodes that may run, the one with the largest number first.

    It is the heap of the C++ library that torch is built with on Linux, step by step, which decides between equal
    numbers.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, T]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, number: int, node: T) -> None:
        """Add a node with this sequence number; that of a leaf is ``LEAF_NUMBER``."""
        self._heap.append((number, node))
        self._rise(len(self._heap) - 1, (number, node))

    def pop(self) -> T:
        """Take the node that runs next."""
        heap = self._heap
        last = heap.pop()
        if not heap:
            return last[1]
        first, hole, child = heap[0], 0, 2
        while child < len(heap):
            child -= heap[child][0] < heap[child - 1][0]
            heap[hole] = heap[child]
            hole, child = child, 2 * child + 2
        if child == len(heap):  # a child without a sibling
            heap[hole] = heap[child - 1]
            hole = child - 1
        self._rise(hole, last)
        return first[1]

    def _rise(self, hole: int, entry: tuple[int, T]) -> None:
        heap = self._heap
        while hole and heap[(hole - 1) // 2][0] < entry[0]:
            heap[hole] = heap[(hole - 1) // 2]
            hole = (hole - 1) // 2
        heap[hole] = entry
