"""The nodes of a backward graph, a list a field: a million fit into memory.

What is equal is one object, and edges are numbers in one flat list: an object for each node would wake the garbage
collector all the time, and to walk a large graph took it longer than us.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

from retrograd.core.hooks.reach import find_ends, link_to, read_links
from retrograd.following.graph.node import Edge, Line, Node, SavedValue, TensorInfo

Infos = tuple[TensorInfo | None, ...]


class Edges(Sequence[tuple[Edge | None, ...]]):
    """For each node, where the gradients go that it gives.

    Args:
        links: of nodes that were found, as ``hooks.reach`` writes them.
    """

    def __init__(self, links: Iterable[int] = ()) -> None:
        self._links = list(links)
        self._ends = find_ends(self._links)

    def append(self, edges: Iterable[Edge | None]) -> None:
        """Add a node."""
        self._links += link_to(None if edge is None else (edge.node, edge.slot) for edge in edges)
        self._ends.append(len(self._links))

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, place: int) -> tuple[Edge | None, ...]: ...
    @overload
    def __getitem__(self, place: slice) -> list[tuple[Edge | None, ...]]: ...
    def __getitem__(self, place: int | slice) -> tuple[Edge | None, ...] | list[tuple[Edge | None, ...]]:
        if isinstance(place, slice):
            return [self[each] for each in range(len(self))[place]]
        place = range(len(self))[place]
        begin = self._ends[place - 1] if place else 0
        return _make_edges(next(read_links(self._links[begin : self._ends[place]])))

    def __iter__(self) -> Iterator[tuple[Edge | None, ...]]:
        return map(_make_edges, read_links(self._links))

    def __eq__(self, other: object) -> bool:
        return self._links == other._links if isinstance(other, Edges) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


def _make_edges(targets: tuple[tuple[int, int] | None, ...]) -> tuple[Edge | None, ...]:
    return tuple([None if target is None else Edge(*target) for target in targets])


class Columns:
    """Facts about the nodes, one list a field."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.numbers: list[int | None] = []
        self.incoming: list[Infos] = []
        self.edges = Edges()
        self.saved: list[tuple[SavedValue, ...]] = []
        self.places: list[tuple[str | None, int, Line | None]] = []
        self.parameters: dict[int, str] = {}

    def add(self, node: Node) -> None:
        """Append a node; what goes out of it is told by where it goes."""
        if node.parameter is not None:
            self.parameters[len(self.names)] = node.parameter
        self.names.append(node.name)
        self.numbers.append(node.number)
        self.incoming.append(node.incoming)
        self.edges.append(node.edges)
        self.saved.append(node.saved)
        self.places.append((node.module, node.call, node.line))

    def node(self, index: int) -> Node:
        """The node at this index."""
        module, call, line = self.places[index]
        return Node(
            index=index,
            name=self.names[index],
            number=self.numbers[index],
            incoming=self.incoming[index],
            edges=self.edges[index],
            outgoing=tuple(map(self._info, self.edges[index])),
            saved=self.saved[index],
            module=module,
            call=call,
            line=line,
            parameter=self.parameters.get(index),
        )

    def contents(self) -> tuple[object, ...]:
        """All that tells one graph from another."""
        return self.names, self.incoming, self.edges, self.saved, self.places, self.parameters

    def stored(self) -> dict[str, Iterator[Any]]:
        """The columns of a file."""
        lines = [line for _, _, line in self.places]
        return {
            "name": iter(self.names),
            "number": iter(self.numbers),
            "incoming": map(_write_infos, self.incoming),
            "edges": ([edge and {"node": edge.node, "slot": edge.slot} for edge in edges] for edges in self.edges),
            "outgoing": (_write_infos(tuple(map(self._info, edges))) for edges in self.edges),
            "saved": ([_write_saved(each) for each in saved] for saved in self.saved),
            "module": (module for module, _, _ in self.places),
            "call": (call for _, call, _ in self.places),
            "file": (line and line.file for line in lines),
            "line": (line and line.line for line in lines),
            "function": (line and line.function for line in lines),
            "operation": (line and line.operation for line in lines),
            "parameter": (self.parameters.get(index) for index in range(len(self.names))),
        }

    def _info(self, edge: Edge | None) -> TensorInfo | None:
        if edge is None:
            return None
        incoming = self.incoming[edge.node]
        return incoming[edge.slot] if edge.slot < len(incoming) else None


def _write_infos(infos: Infos) -> list[str | None]:
    return [None if info is None else str(info) for info in infos]


def _write_saved(saved: SavedValue) -> dict[str, Any]:
    tensor = saved.tensor and str(saved.tensor)
    return {"name": saved.name, "tensor": tensor, "value": saved.value, "version": saved.version}
