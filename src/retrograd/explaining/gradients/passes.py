"""Backward passes: what one did for some leaves, and where in it gradients became zero or ended."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from retrograd.core.errors import NoGraphError
from retrograd.core.groups import gather
from retrograd.core.hooks.backward import EngineRun
from retrograd.core.hooks.dispatch import plain_torch
from retrograd.core.hooks.flow import Cut, FlowNotes
from retrograd.core.hooks.node_tap import NodeGradients, NodeHooks
from retrograd.core.hooks.nodes import is_freed, is_leaf, name_of, number_of, root_edges, variable_of
from retrograd.core.hooks.reach import PassNodes, Reach, find_nodes, guard_nodes, read_links
from retrograd.core.hooks.torch_calls import user_line
from retrograd.following.graph.node import readable_values
from retrograd.following.graph.origin import Origin
from retrograd.following.graph.origins import Origins

Why = Literal[
    "has one", "not yet", "unknown",
    "frozen", "not a leaf", "never called", "not used", "no_grad", "checkpoint", "inference_mode", "cut",
    "not in the loss", "no graph", "not asked for", "returned", "no derivative", "cleared", "failed",
    "zero factor", "dead units", "saturated", "step function", "not picked", "hook", "zero", "cancels",
    "not optimized", "not in the model", "another copy", "no backward",
]  # fmt: skip
"""In one or two words: ``has one``; ``not yet`` (it will be there after backward); ``unknown``; and what is missing."""


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
    """Find what a pass from here would reach; nothing is run.

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
            line=user_line(sys._getframe(1)),
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
        """Return what was seen of the pass, which has ended, and let go of the graph."""
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
    origin = origins.find(number_of(node)) or Origin()
    return origin.place, origin.module


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


# ---- where gradients become zero, or end ----

_OFF = ("Relu", "Threshold", "Hardtanh", "Clamp", "Hardsigmoid", "Hardswish", "Softshrink", "Hardshrink", "Prelu")
_FLAT = ("Round", "Floor", "Ceil", "Trunc", "Sign", "Sgn", "Heaviside", "Zeros", "FullLike", "Fill")
_SATURATING = ("Sigmoid", "Tanh", "Softmax", "LogSoftmax", "LogSigmoid", "Softplus", "Erf", "Gelu", "Silu", "Mish")
_PICKING = (
    "Index", "Select", "Slice", "Gather", "Embedding", "Narrow", "Split", "Unbind", "Max", "Min", "Amax", "Topk",
    "Sort", "Where", "MaskedFill", "MaskedSelect", "Take",
)  # fmt: skip
_FACTORS = ("Mul", "Div", "Mm", "Addmm", "Bmm", "Baddbmm", "Convolution", "Linear", "Dot", "Mv", "Prod", "Einsum")


@dataclass(frozen=True, slots=True)
class End:
    """A node behind which a gradient is zero, or that gave none.

    Attributes:
        place: of the node among those of the pass.
        kind: of the node.
        edge: which of the gradients that it gives.
        is_none: it gave None.
        is_hook: what it gave was not zero, and is zero where it arrives: a hook in between made it so.
        is_sum: so it is with what another node gave: both add up to zero. The node is the one that gave both.
    """

    place: int
    kind: str
    edge: int
    is_none: bool = False
    is_hook: bool = False
    is_sum: bool = False

    @property
    def why(self) -> Why:
        """In a word."""
        kind = self.kind
        if self.is_sum:
            return "cancels"
        if self.is_hook or kind.startswith("BackwardHookFunction"):
            return "hook"
        if self.is_none:
            return "no derivative"
        for starts, why in _KINDS:
            if kind.startswith(starts):
                return why
        return "zero"


_KINDS: tuple[tuple[tuple[str, ...], Why], ...] = (
    (_FLAT, "step function"),
    (_OFF, "dead units"),
    (_SATURATING, "saturated"),
    (_PICKING, "not picked"),
    (_FACTORS, "zero factor"),
)


class ZeroWatch:
    """Records of each node of a pass whether what comes in, and what goes out, is zero. It waits for the device.

    Args:
        nodes: those that run; their places are those in ``reach``.
        reach: the graph.
    """

    def __init__(self, nodes: Sequence[Any], reach: Reach) -> None:
        self._kinds = [name_of(node) for node in reach.nodes]
        self._is_leaf = [is_leaf(node) for node in reach.nodes]
        self._edges = list(read_links(reach.links))
        places = {id(node): place for place, node in enumerate(reach.nodes)}
        self._places = [places[id(node)] for node in nodes]
        self._came: dict[int, bool] = {}
        self._gave: dict[int, tuple[bool | None, ...]] = {}

    def before(self, index: int, incoming: NodeGradients) -> None:
        """A node is about to run."""
        self.note_in(index, any(map(_is_some, incoming)))

    def after(self, index: int, outgoing: NodeGradients) -> None:
        """The pass has run."""
        self.note_out(index, tuple(None if each is None else _is_some(each) for each in outgoing))

    def note_in(self, index: int, is_some: bool) -> None:
        """Note whether what came in to a node was not zero."""
        place = self._places[index]
        self._came[place] = self._came.get(place, False) or is_some

    def note_out(self, index: int, are_some: tuple[bool | None, ...]) -> None:
        """Note the same of each gradient that it gave; None for none."""
        self._gave[self._places[index]] = are_some

    def came(self, place: int) -> bool | None:
        """Return whether what came in to a node was not zero; None where it did not run."""
        return self._came.get(place)

    def find_ends(self, place: int) -> list[End]:
        """Where the gradient of a leaf became zero, or ended: as near to it as it can be told."""
        found: list[End] = []
        seen = {place}
        waiting = [place]
        for target in waiting:  # grows while it is walked
            into = self._into(target)
            giving = [parent for parent, edge, has_come in into if not has_come and self._gives(parent, edge)]
            if len(giving) > 1:
                source = self._find_source(giving)
                found.append(End(source, self._kinds[source], 0, is_sum=True))
                continue
            for parent, edge, has_come in into:
                end = self._judge(parent, edge, has_come=has_come)
                if end is not None:
                    found.append(end)
                elif parent not in seen and self._came.get(parent) is not True:
                    seen.add(parent)
                    waiting.append(parent)
        return found

    def _judge(self, parent: int, edge: int, *, has_come: bool) -> End | None:
        gave = self._gave.get(parent)
        if gave is None:
            return None
        kind = self._kinds[parent]
        if gave[edge]:
            return None if has_come else End(parent, kind, edge, is_hook=True)
        return End(parent, kind, edge, is_none=gave[edge] is None) if self._came.get(parent) else None

    def _gives(self, parent: int, edge: int) -> bool:
        return bool(self._gave.get(parent, {edge: None})[edge])

    def _find_source(self, places: Sequence[int]) -> int:
        """The node nearest to these that all of them got their gradients from; the first where there is none."""
        shared = set.intersection(*({place, *self._list_before(place)} for place in places))
        return next((place for place in (places[0], *self._list_before(places[0])) if place in shared), places[0])

    def _list_before(self, place: int) -> list[int]:
        """Nodes that ran before one and lead to it, the nearest first."""
        waiting, seen = [place], {place}
        for target in waiting:  # grows
            fresh = [parent for parent, _ in self._parents.get(target, ()) if parent not in seen]
            seen.update(fresh)
            waiting += fresh
        return waiting[1:]

    def _into(self, target: int) -> list[tuple[int, int, bool]]:
        came = self._came.get(target, False)
        return [(parent, edge, came) for parent, edge in self._parents.get(target, ())]

    @cached_property
    def _parents(self) -> dict[int, list[tuple[int, int]]]:
        return gather(
            (to[0], (parent, edge))
            for parent, edges in enumerate(self._edges)
            for edge, to in enumerate(edges)
            if to is not None
        )


def _is_some(gradient: Tensor | None) -> bool:
    if gradient is None:
        return False
    with plain_torch():
        return has_nonzero(gradient) is not False


def has_nonzero(tensor: Tensor) -> bool | None:
    """Return whether an element is not zero; NaN is not. None where that cannot be told."""
    with torch.no_grad():
        values = readable_values(tensor)
        return None if values is None else bool((values != 0).any())
