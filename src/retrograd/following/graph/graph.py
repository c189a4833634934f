"""A backward graph as plain data: it saves, loads and compares.

The order in which the engine runs its nodes follows from it.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from retrograd.core.amounts import count_of
from retrograd.core.drawings import drawn_by
from retrograd.core.errors import DetachedGraphError, GraphError, NoSuchNodeError
from retrograd.core.files import make_all_storable, write_file
from retrograd.core.foreign.tables import read_table
from retrograd.core.foreign.text import check_fields, fits, parse_json
from retrograd.core.hooks.nodes import LEAF_NUMBER
from retrograd.following.graph.columns import Columns
from retrograd.following.graph.node import Edge, Line, Node, SavedValue, TensorInfo, matches

_SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("number", pa.uint64()),
        ("incoming", pa.list_(pa.string())),
        ("edges", pa.list_(pa.struct([("node", pa.int64()), ("slot", pa.int32())]))),
        ("outgoing", pa.list_(pa.string())),
        (
            "saved",
            pa.list_(
                pa.struct(
                    [("name", pa.string()), ("tensor", pa.string()), ("value", pa.string()), ("version", pa.int64())]
                )
            ),
        ),
        ("module", pa.string()),
        ("call", pa.int32()),
        ("file", pa.string()),
        ("line", pa.int32()),
        ("function", pa.string()),
        ("operation", pa.string()),
        ("parameter", pa.string()),
    ]
)


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
        columns = {name: make_all_storable(values) for name, values in self._columns.stored().items()}
        roots = json.dumps([[edge.node, edge.slot] for edge in self.roots])
        table = pa.table(columns, schema=_SCHEMA.with_metadata({"retrograd.roots": roots}))
        with write_file(path) as file:
            pq.write_table(table, file, compression="zstd")
        return Path(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Graph:
        """Read a graph that was saved.

        Raises:
            GraphError: the file is none, or is damaged.
        """
        try:
            table = read_table(path)
            roots = [Edge(node, slot) for node, slot in parse_json(table.schema.metadata[b"retrograd.roots"])]
            columns = Columns()
            for batch in table.select(_SCHEMA.names).cast(_SCHEMA).to_batches(max_chunksize=10_000):
                for row in batch.to_pylist():
                    columns.add(_read_row(len(columns.names), row))
            check_edges(roots, columns.edges)
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise GraphError(
                f"{str(path)!r} holds no graph that can be read: {error}",
                repair="give a file that Graph.save() has written.",
            ) from error
        return cls(columns, roots)


def _nearest(pattern: str, graph: Graph) -> str:
    places = sorted({name for node in graph for name in (node.place, node.name, node.module) if name is not None})
    near = difflib.get_close_matches(pattern, places, n=3, cutoff=0.4)
    return f"the nearest are {', '.join(near)}." if near else f"the first ones are {', '.join(places[:3])}."


def _read_row(index: int, row: dict[str, Any]) -> Node:
    line = Line(row["file"], row["line"], row["function"], row["operation"]) if row["file"] is not None else None
    saved = [SavedValue(each["name"], _parse(each["tensor"]), each["value"], each["version"]) for each in row["saved"]]
    node = Node(
        index=index,
        name=row["name"],
        number=row["number"],
        incoming=tuple(map(_parse, row["incoming"])),
        edges=tuple(edge and Edge(edge["node"], edge["slot"]) for edge in row["edges"]),
        saved=tuple(saved),
        module=row["module"],
        call=row["call"],
        line=line,
        parameter=row["parameter"],
    )
    for each in (node, *saved, *([] if line is None else [line])):
        check_fields(each)
    return node


def check_edges(roots: Sequence[Edge], edges: Sequence[Sequence[Edge | None]]) -> None:
    """Check that edges lead to nodes that are there, and not round in a circle.

    Raises:
        ValueError: one does not.
    """
    entered = [0] * len(edges)
    for edge in (*roots, *(each for leaving in edges for each in leaving if each is not None)):
        if not isinstance(edge.node, int) or not 0 <= edge.node < len(edges) or not fits(edge.slot, int):
            raise ValueError(f"there is no node {edge.node!r}")
    for edge in (each for leaving in edges for each in leaving if each is not None):
        entered[edge.node] += 1
    ready, reached = [node for node, count in enumerate(entered) if not count], 0
    while ready:
        reached += 1
        for edge in (each for each in edges[ready.pop()] if each is not None):
            entered[edge.node] -= 1
            if not entered[edge.node]:
                ready.append(edge.node)
    if reached < len(edges):
        raise ValueError("its edges lead round in a circle")


def _parse(text: str | None) -> TensorInfo | None:
    return None if text is None else TensorInfo.parse(text)


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
