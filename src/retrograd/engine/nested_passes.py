"""A node may run a backward pass of its own, as reentrant checkpointing does; what that adds to ``.grad`` is caught."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self
from weakref import ref

from torch import Tensor

from retrograd.hooks.backward import EngineRun, backward_followers
from retrograd.hooks.nodes import root_edges, variable_of
from retrograd.hooks.reach import find_nodes, guard_nodes


class CaughtGradients:
    """While it is entered, backward passes that this thread runs find something else in every ``.grad``.

    The node that ran the pass may read what was put there (a checkpoint does so with its own inputs), so
    :meth:`settle` is to be called once that node has returned.

    Args:
        begin_with: gives what a leaf's ``.grad`` shall be when a pass begins; a pass may write to it. Nothing by
            default.
    """

    def __init__(self, begin_with: Callable[[Tensor], Tensor | None] = lambda leaf: None) -> None:
        self._begin_with = begin_with
        self._thread = threading.get_ident()
        self._before: dict[int, tuple[ref[Tensor], Tensor | None]] = {}

    def __enter__(self) -> Self:
        backward_followers.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        backward_followers.remove(self)
        self.settle()

    def run_begins(self, run: EngineRun) -> None:
        """Put what was in ``.grad`` aside."""
        if threading.get_ident() != self._thread or not run.accumulates:
            return
        for leaf in _find_leaves(run):
            known = self._before.get(id(leaf))
            if known is None or known[0]() is not leaf:
                self._before[id(leaf)] = ref(leaf), leaf.grad
                leaf.grad = self._begin_with(leaf)

    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        """Nothing yet."""

    def settle(self) -> list[tuple[Tensor, Tensor]]:
        """Put every ``.grad`` back.

        Returns:
            Leaves, and what their ``.grad`` had become. Leaves that the nested pass made for itself are gone.
        """
        if not self._before:
            return []
        became = []
        for find, before in self._before.values():
            leaf = find()
            if leaf is None:
                continue
            gradient, leaf.grad = leaf.grad, before
            if gradient is not None:
                became.append((leaf, gradient))
        self._before.clear()
        return became


def _find_leaves(run: EngineRun) -> Iterator[Tensor]:
    """Whose ``.grad`` a pass may change."""
    if run.inputs:
        yield from (each for each in run.inputs if isinstance(each, Tensor))
        return
    nodes = find_nodes(root_edges(run.roots)).nodes
    guard_nodes(nodes)
    for node in nodes:
        leaf = variable_of(node)
        if leaf is not None:
            yield leaf
