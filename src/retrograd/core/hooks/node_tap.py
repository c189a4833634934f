"""A tap on the nodes of a graph: something is called just before each of them runs.

A hook on a node is expensive: torch makes a table and a handle for each. So most nodes are given a hook on the first
gradient that comes in, and all of them share one table: setting it costs a fraction of a microsecond, and to take all
of them away is to empty the table. Nobody but us can reach that table, for it belongs to no tensor of the program's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from retrograd.core.hooks.engine import current_graph_task, current_node, uncompiled
from retrograd.core.hooks.listeners import HookEntry, enter_node
from retrograd.core.hooks.nodes import IDENTITIES_LAST, LEAF_KIND, number_of
from retrograd.core.hooks.reach import PassNodes

_MOST_HOOKED = 100_000
"""Nodes that are remembered, or those of one graph if there are more: some 100 bytes each."""

SeeFirst = Callable[[Tensor | None], None]
SeeAll = Callable[[tuple[Tensor | None, ...]], None]


class NodeTap:
    """The hooks of one pass; made by :meth:`NodeTaps.begin`.

    Hooks of the program's on tensors have run when ours does, and those on nodes have not.

    A node whose hooks are being called must not be given another one: torch would go on in memory that is no longer
    there. So a node that this thread is at, in a pass around this one, is left out; so are nodes of a pass that runs in
    another thread.
    """

    __slots__ = (
        "_busy",
        "_handles",
        "_is_paused",
        "_memory",
        "_nodes",
        "_see_all",
        "_see_first",
        "_see_leaf",
        "_thread",
    )

    def __init__(
        self, memory: _HookedNodes, busy: tuple[Any, ...], see_first: SeeFirst, see_all: SeeAll, see_leaf: SeeAll
    ) -> None:
        self._busy = busy
        self._thread = threading.get_ident()
        self._nodes: Sequence[Any] = ()
        self._memory = memory
        self._see_first = see_first
        self._see_all = see_all
        self._see_leaf = see_leaf
        self._is_paused = False
        self._handles: list[HookEntry] = []

    def watch(self, nodes: Sequence[Any], several: Container[Any] = (), *, is_kept: bool = False) -> None:
        """Set the hooks on these nodes.

        Args:
            nodes: which. Whoever has got hold of a whole graph gives it to ``guard_nodes`` before letting go.
            several: those of them that take several gradients, and of which all are to be seen.
            is_kept: the graph is not freed when the pass ends, and may be run again.
        """
        self.resume()
        carrier = self._memory.carrier
        known = self._memory.hooked
        leaf_kind: Any = LEAF_KIND
        others = [each._nodes for each in list(_running) if each._thread != self._thread]
        if others or self._busy:
            taken = {id(node) for each in others for node in each}
            nodes = [node for node in nodes if id(node) not in taken and node not in self._busy]
        self._nodes = nodes
        see_all, see_leaf = self._unless_paused(self._see_all), self._unless_paused(self._see_leaf)
        _running.add(self)
        for node in nodes:
            if type(node) is leaf_kind:  # it knows only the hooks of its leaf
                self._handles.append(enter_node(node.register_prehook, see_leaf))
            elif node in several or (is_kept and not IDENTITIES_LAST):
                self._handles.append(enter_node(node.register_prehook, see_all))
            elif not known or known.get(number_of(node)) != id(node):
                node._register_hook_dict(carrier)
        if is_kept and IDENTITIES_LAST:
            self._memory.remember(node for node in nodes if node not in several)

    def pause(self) -> None:
        """Call nothing, for a pass inside this one runs, maybe over the same nodes."""
        self._is_paused = True
        self._memory.table.clear()

    def resume(self) -> None:
        """Call again what is to be called."""
        self._is_paused = False
        self._memory.table[self._see_first] = self._see_first

    def remove(self) -> None:
        """Take all hooks away."""
        self.pause()
        _running.discard(self)
        self._nodes = ()
        while self._handles:
            self._handles.pop().remove()

    def _unless_paused(self, see: SeeAll) -> SeeAll:
        @uncompiled
        def see_unless_paused(incoming: tuple[Tensor | None, ...]) -> None:
            if not self._is_paused:
                see(incoming)

        return see_unless_paused


_running: set[NodeTap] = set()


class NodeTaps(threading.local):
    """The taps of one watcher. Each thread has its own; of passes within passes only the innermost is tapped."""

    def __init__(self) -> None:
        self._running: list[NodeTap] = []
        self._memories: list[_HookedNodes] = []

    def begin(self, see_first: SeeFirst, see_all: SeeAll, see_leaf: SeeAll | None = None) -> NodeTap:
        """A pass begins in this thread.

        Args:
            see_first: called with the gradient that comes in to a node that takes one. ``engine.current_node()`` is
                the node. It must not raise, and must return None.
            see_all: the same for a node that takes several.
            see_leaf: the same for a leaf's node; ``see_all`` by default. It must not keep what it is given: the
                gradient would be copied then instead of becoming ``.grad``.
        """
        depth = len(self._running)
        if depth:
            self._running[-1].pause()
        node = current_node()
        busy = (*(self._running[-1]._busy if depth else ()), *((node,) if node is not None else ()))
        if depth == len(self._memories):
            self._memories.append(_HookedNodes())
        tap = NodeTap(self._memories[depth], busy, see_first, see_all, see_leaf or see_all)
        self._running.append(tap)
        return tap

    def tap(
        self,
        found: PassNodes,
        see_first: SeeFirst,
        see_all: SeeAll,
        see_leaf: SeeAll | None = None,
        *,
        several: bool = True,
    ) -> NodeTap:
        """Tap the nodes of a pass that begins in this thread, until :meth:`end`.

        Args:
            found: the nodes; released if they cannot be tapped.
            see_first: as of :meth:`begin`, and so are ``see_all`` and ``see_leaf``.
            see_all: for nodes that take several gradients.
            see_leaf: for nodes of leaves.
            several: whether all gradients of a node that takes several are to be seen, and not only the first.
        """
        tap = self.begin(see_first, see_all, see_leaf)
        try:
            tap.watch(found.nodes, found.reach.several if several else (), is_kept=found.run.keeps_graph)
        except BaseException:
            self.end(tap)
            found.release()
            raise
        return tap

    def end(self, tap: NodeTap) -> None:
        """The pass that began last has ended."""
        tap.remove()
        self._running.remove(tap)
        if self._running:
            self._running[-1].resume()


class _HookedNodes:
    """The table that hooks share, and which nodes of graphs that are kept have it already.

    A hook of this kind cannot be taken from a node, so one that is run again and again would get ever more of them.
    """

    def __init__(self) -> None:
        self.table: OrderedDict[Any, Any] = OrderedDict()
        self.carrier: Any = torch.empty(0)  # only its table of hooks is looked at
        self.carrier._backward_hooks = self.table
        self.hooked: dict[int, int] = {}
        """Number of a node → its identity: both are the same only for one and the same node."""

    def remember(self, nodes: Iterable[Any]) -> None:
        if len(self.hooked) > _MOST_HOOKED:
            self.hooked.clear()
        self.hooked.update((number_of(node), id(node)) for node in nodes)


NodeGradients = tuple[Tensor | None, ...]


class NodeListener(Protocol):
    """Called around each node, in the thread that runs it. May raise: the pass ends."""

    def before(self, index: int, incoming: NodeGradients) -> NodeGradients | None:
        """This node is about to run. What is returned is what it gets instead."""

    def after(self, index: int, outgoing: NodeGradients) -> NodeGradients | None:
        """The node has run, and has not yet let go of what it had saved. The gradients returned go on instead."""


class NodeHooks:
    """Hooks on nodes, until they are removed.

    Args:
        nodes: torch's nodes; the listener is told their place here.
        listener: who is called.
        alone: whether the listener is notified of the first pass that comes along only. Others may go through the same
            nodes: those of a checkpoint inside of that one, and those of the program while that one waits.
    """

    def __init__(self, nodes: Sequence[Any], listener: NodeListener, *, alone: bool = False) -> None:
        self._handles: list[HookEntry] = []
        before, after = _make_hooks(_FirstPassListener(listener) if alone else listener)
        for index, node in enumerate(nodes):
            self._handles.append(enter_node(node.register_prehook, partial(before, index)))
            self._handles.append(enter_node(node.register_hook, partial(after, index)))

    def remove(self) -> None:
        """Take all of them away."""
        while self._handles:
            self._handles.pop().remove()


class _FirstPassListener:
    """Passes on what the first pass tells, and nothing of others."""

    def __init__(self, listener: NodeListener) -> None:
        self._listener = listener
        self._task: int | None = None

    def before(self, index: int, incoming: NodeGradients) -> NodeGradients | None:
        return self._listener.before(index, incoming) if self._is_first() else None

    def after(self, index: int, outgoing: NodeGradients) -> NodeGradients | None:
        return self._listener.after(index, outgoing) if self._is_first() else None

    def _is_first(self) -> bool:
        task = current_graph_task()
        if self._task is None:
            self._task = task
        return task == self._task


def _make_hooks(listener: NodeListener) -> tuple[Any, Any]:
    @uncompiled
    def before(index: int, incoming: NodeGradients) -> NodeGradients | None:
        return listener.before(index, incoming)

    @uncompiled
    def after(index: int, outgoing: NodeGradients, incoming: NodeGradients) -> NodeGradients | None:
        return listener.after(index, outgoing)

    return before, after
