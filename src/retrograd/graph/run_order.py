"""The order in which the engine runs the nodes of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Generic, TypeVar

from retrograd.graph.node import Edge
from retrograd.hooks.nodes import LEAF_NUMBER

T = TypeVar("T")


def order_of_run(
    numbers: Sequence[int | None], edges: Sequence[Iterable[Edge | None]], roots: Sequence[Edge]
) -> list[int]:
    """Of the nodes that are ready, the one with the largest number runs next; leaves before all others.

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
