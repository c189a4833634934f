"""The order in which the engine runs the nodes of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from retrograd.graph.node import Edge
from retrograd.hooks.nodes import LEAF_NUMBER


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
    ready = _ReadyQueue(numbers)
    order: list[int] = []
    targets: Iterable[Edge | None] = roots
    while True:
        for edge in targets:
            if edge is not None:
                waiting[edge.node] -= 1
                if not waiting[edge.node]:
                    ready.push(edge.node)
        if not ready:
            return order
        order.append(ready.pop())
        targets = edges[order[-1]]


class _ReadyQueue:
    """The heap of the C++ library that torch is built with on Linux, step by step: it decides between equal numbers."""

    def __init__(self, numbers: Sequence[int | None]) -> None:
        self._numbers = [LEAF_NUMBER if number is None else number for number in numbers]
        self._heap: list[int] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, node: int) -> None:
        self._heap.append(node)
        self._rise(len(self._heap) - 1, node)

    def pop(self) -> int:
        heap, numbers = self._heap, self._numbers
        last = heap.pop()
        if not heap:
            return last
        first, hole, child = heap[0], 0, 2
        while child < len(heap):
            child -= numbers[heap[child]] < numbers[heap[child - 1]]
            heap[hole] = heap[child]
            hole, child = child, 2 * child + 2
        if child == len(heap):  # a child without a sibling
            heap[hole] = heap[child - 1]
            hole = child - 1
        self._rise(hole, last)
        return first

    def _rise(self, hole: int, node: int) -> None:
        heap, numbers = self._heap, self._numbers
        while hole and numbers[heap[(hole - 1) // 2]] < numbers[node]:
            heap[hole] = heap[(hole - 1) // 2]
            hole = (hole - 1) // 2
        heap[hole] = node
