"""What a backward pass did for some leaves, as plain data."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from retrograd.errors import NoGraphError
from retrograd.gradients.zeros import End, ZeroWatch
from retrograd.graph.origins import Origins
from retrograd.hooks.backward import EngineRun
from retrograd.hooks.flow import Cut, FlowNotes, line_of
from retrograd.hooks.node_tap import NodeHooks
from retrograd.hooks.nodes import is_freed, name_of, number_of, root_edges, variable_of
from retrograd.hooks.reach import PassNodes, find_nodes, guard_nodes


@dataclass(frozen=True, slots=True)
class FlowEnd:
    """Where a gradient became zero, or ended.

    Attributes:
        end: the node.
        line: ``file:line`` of the forward that made it; empty where that is not known.
        module: path of the module in whose call it was made.
    """

    end: End
    line: str = ""
    module: str | None = None


@dataclass(frozen=True, slots=True)
class PassSeen:
    """A backward pass, or the graph of a loss that none may have run through.

    Attributes:
        line: who called it; empty of a graph alone.
        reached: place of each leaf that it leads to → whether what came in was not zero; None where nothing came, or
            nobody looked.
        lost: of leaves where nothing came, or nothing but zeros: where it was lost.
        strangers: shape and type of leaves that it leads to and that nobody asked of.
        is_watched: it ran, and its nodes were looked at.
        is_freed: of a graph alone: a pass has freed what it had saved.
        accumulates: gradients are added to ``.grad``; else they are returned.
        has_inputs: only some of them were asked for.
        failed: it raised.
        cuts: behind which cuts the loss was made.
        has_graph: the loss has one.
        freed: the node that an earlier pass has freed, and its line; empty where there is none.
    """

    line: str = ""
    reached: dict[int, bool | None] = field(default_factory=dict)
    lost: dict[int, tuple[FlowEnd, ...]] = field(default_factory=dict)
    strangers: tuple[tuple[tuple[int, ...], str], ...] = ()
    is_watched: bool = False
    is_freed: bool = False
    accumulates: bool = True
    has_inputs: bool = False
    failed: bool = False
    cuts: tuple[Cut, ...] = ()
    has_graph: bool = True
    freed: str = ""


def look_at_graph(loss: Any, places: WeakTensorKeyDictionary) -> PassSeen:
    """What a pass from here would reach; nothing is run.

    Raises:
        NoGraphError: there is no graph.
    """
    reach = find_nodes(root_edges(loss))
    leaves, strangers = _find_leaves(reach.nodes, places)
    is_free = any(map(is_freed, reach.nodes))
    guard_nodes(reach.nodes, reach.links)
    return PassSeen(reached=dict.fromkeys(leaves), strangers=strangers, is_freed=is_free)


class PassWatch:
    """Watches one outermost pass.

    Args:
        run: the pass.
        places: the leaves that are asked of.
        notes: what was seen of the forward.
        origins: where nodes were made.
    """

    def __init__(self, run: EngineRun, places: WeakTensorKeyDictionary, notes: FlowNotes, origins: Origins) -> None:
        self._origins = origins
        self._hooks: NodeHooks | None = None
        self._pass: PassNodes | None = None
        self.seen = PassSeen(
            line=line_of(sys._getframe(1)),
            accumulates=run.accumulates,
            has_inputs=bool(run.inputs),
            is_watched=True,
            cuts=_cuts_behind(run.roots, notes),
        )
        try:
            self._pass = found = PassNodes(run)
        except NoGraphError:
            self.seen = replace(self.seen, has_graph=False)
            return
        self._leaves, strangers = _find_leaves(found.reach.nodes, places)
        self._asked = {places.get(each) for each in run.inputs if isinstance(each, Tensor)} or set(self._leaves)
        self.seen = replace(self.seen, strangers=strangers, freed=self._find_freed(found.nodes))
        if not run.is_nested:
            self._zeros = ZeroWatch(found.nodes, found.reach)
            self._hooks = NodeHooks(found.nodes, self._zeros)

    def end(self, *, failed: bool) -> PassSeen:
        """It has ended: let go of the graph."""
        if self._pass is None:
            return replace(self.seen, failed=failed)
        reached: dict[int, bool | None] = dict.fromkeys(self._leaves)
        lost: dict[int, tuple[FlowEnd, ...]] = {}
        if self._hooks is not None:
            self._hooks.remove()
            for place, node in self._leaves.items():
                reached[place] = self._zeros.came(node)
                if not reached[place] and place in self._asked:
                    lost[place] = tuple(map(self._locate, self._zeros.find_ends(node)))
        self._pass.release()
        self._pass = None
        return replace(self.seen, reached=reached, lost=lost, failed=failed)

    def _locate(self, end: End) -> FlowEnd:
        assert self._pass is not None
        line, module = _find_place(self._pass.reach.nodes[end.place], self._origins)
        return FlowEnd(end, line, module)

    def _find_freed(self, nodes: Sequence[Any]) -> str:
        for node in sorted(nodes, key=number_of, reverse=True):
            if variable_of(node) is None and is_freed(node):
                line, _ = _find_place(node, self._origins)
                return f"{name_of(node)}, made at {line}" if line else name_of(node)
        return ""


def _find_place(node: Any, origins: Origins) -> tuple[str, str | None]:
    origin = origins.find(number_of(node))
    if origin is None:
        return "", None
    return (f"{origin.line.file}:{origin.line.line}" if origin.line is not None else ""), origin.module


def _find_leaves(
    nodes: Sequence[Any], places: WeakTensorKeyDictionary
) -> tuple[dict[int, int], tuple[tuple[tuple[int, ...], str], ...]]:
    """Place of each leaf that is asked of → the place of its node; and what the others are."""
    found: dict[int, int] = {}
    strangers = []
    for index, node in enumerate(nodes):
        leaf = variable_of(node)
        if leaf is not None:
            place = places.get(leaf)
            if place is None:
                strangers.append((tuple(leaf.shape), str(leaf.dtype)))
            else:
                found[place] = index
    return found, tuple(strangers)


def _cuts_behind(roots: Sequence[Any], notes: FlowNotes) -> tuple[Cut, ...]:
    found = [cut for root in roots if isinstance(root, Tensor) for cut in notes.cuts_behind(root)]
    return tuple(dict.fromkeys(found))
