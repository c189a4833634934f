"""A tap on the nodes of a graph: something is called just before each of them runs.

A hook on a node costs 6 µs: torch makes a table and a handle for each. So most nodes are given a hook on the first
gradient that comes in, and all of them share one table: setting it costs a fraction of a microsecond, and to take all
of them away is to empty the table. Nobody but us can reach that table, for it belongs to no tensor of the program's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import Tensor

from retrograd.hooks.nodes import LEAF_KIND

SeeFirst = Callable[[Tensor | None], None]
SeeAll = Callable[[tuple[Tensor | None, ...]], None]


class NodeTap:
    """The hooks of one pass.

    Hooks of the program's on tensors have run when ours does, and those on nodes have not.

    Args:
        see_first: called with the gradient that comes in to a node that takes one. ``engine.current_node()`` is the
            node. It must not raise, and must return None.
        see_all: the same for a node that takes several.
        see_leaf: the same for a leaf's node; ``see_all`` by default. It must not keep what it is given: the gradient
            would be copied then instead of becoming ``.grad``.
    """

    __slots__ = ("_carrier", "_handles", "_see_all", "_see_first", "_see_leaf", "_table")

    def __init__(self, see_first: SeeFirst, see_all: SeeAll, see_leaf: SeeAll | None = None) -> None:
        self._see_first = see_first
        self._see_all = see_all
        self._see_leaf = see_leaf or see_all
        self._handles: list[Any] = []
        self._carrier: Any = torch.empty(0)  # only its table of hooks is looked at
        self._table: OrderedDict[Any, Any] = OrderedDict()

    def watch(self, nodes: Iterable[Any], several: Container[Any] = ()) -> None:
        """Set the hooks on these nodes.

        Args:
            nodes: which. Whoever has got hold of a whole graph gives it to ``guard_nodes`` before letting go.
            several: those of them that take several gradients, and of which all are to be seen.
        """
        if not self._table:
            self._table[self._see_first] = self._see_first
            self._carrier._backward_hooks = self._table
        carrier = self._carrier
        leaf_kind: Any = LEAF_KIND
        for node in nodes:
            if type(node) is leaf_kind:  # it knows only the hooks of its leaf
                self._handles.append(node.register_prehook(self._see_leaf))
            elif node in several:
                self._handles.append(node.register_prehook(self._see_all))
            else:
                node._register_hook_dict(carrier)

    def remove(self) -> None:
        """Take all hooks away."""
        self._table.clear()
        while self._handles:
            self._handles.pop().remove()
