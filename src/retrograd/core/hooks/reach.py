"""Nodes that can be reached from the roots of a backward pass: each is found once, without recursion.

A C++ node that Python has seen is freed recursively by torch 2.13: some 40,000 levels exhaust the stack of the
main thread, 2,400 that of one with 512 KiB. So once many nodes of a graph have been seen, every so often the newest of
them are given the list of those seen before. A list is emptied from its end when its last holder has died, that is
from the node nearest to it, and each death finds its successor still held; and CPython takes apart lists within lists
without recursion. Whatever holds a node of a list must be newer than it, or it would hold itself.
Sequence numbers tell.
"""

from __future__ import annotations

import math
import threading
import weakref
from array import array
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from retrograd.core.hooks.backward import EngineRun
from retrograd.core.hooks.native import native
from retrograd.core.hooks.nested import flatten
from retrograd.core.hooks.nodes import LEAF_NUMBER, edges_of, is_python, name_of, number_of, root_edges, variable_of

_NOWHERE = -1
_END = -2
_SIGN = "retrograd.sign"


class Reach(NamedTuple):
    """All nodes that were reached, and the links between them.

    Attributes:
        nodes: those at the roots first.
        several: those of them that take several gradients.
        links: where each leads, as :func:`read_links` tells.
    """

    nodes: list[Any]
    several: set[Any]
    links: array[int]


def find_nodes(roots: Iterable[tuple[Any, int]], most: float = math.inf) -> Reach:
    """Find everything that these edges lead to, or no more nodes than some once there are more than ``most``."""
    edges = list(roots)
    nodes = list(dict.fromkeys(node for node, _ in edges))
    several = {node for node, slot in edges if slot}
    find = native.follow if native is not None else follow
    return Reach(nodes, several, array("q", find(nodes, several, most)))


def follow(nodes: list[Any], several: set[Any], most: float) -> array[int] | bytes:
    """Append to these nodes all that they lead to, and return the links."""
    places = {node: place for place, node in enumerate(nodes)}
    links = array("q")  # a list for each node would wake the garbage collector all the time
    note, note_node, find = links.append, nodes.append, places.get
    for node in nodes:  # grows while it is walked
        for following, slot in node.next_functions:
            if following is None:
                note(_NOWHERE)
                continue
            place = find(following)
            if place is None:
                place = places[following] = len(nodes)
                note_node(following)
            if slot:
                several.add(following)
                note(_END - slot)
            note(place)
        note(_END)
        if len(nodes) > most:
            break
    return links


def number_nodes(nodes: list[Any]) -> array[int]:
    """The sequence number of each node."""
    return array("Q", native.number_nodes(nodes) if native is not None else map(number_of, nodes))


def read_links(links: Sequence[int]) -> Iterator[tuple[tuple[int, int] | None, ...]]:
    """For each node where its gradients go: to which place among the nodes, and which gradient it is there."""
    edges: list[tuple[int, int] | None] = []
    slot = 0
    for link in links:
        if link >= 0:
            edges.append((link, slot))
            slot = 0
        elif link == _NOWHERE:
            edges.append(None)
        elif link == _END:
            yield tuple(edges)
            edges = []
        else:
            slot = _END - link


def link_to(targets: Iterable[tuple[int, int] | None]) -> list[int]:
    """The links of one node, of which :func:`read_links` makes these edges."""
    links = []
    for target in targets:
        if target is None:
            links.append(_NOWHERE)
            continue
        place, slot = target
        links += [_END - slot, place] if slot else [place]
    links.append(_END)
    return links


def find_ends(links: Iterable[int]) -> list[int]:
    """For each node the place behind the last of its links."""
    return [place for place, link in enumerate(links, 1) if link == _END]


class PassNodes:
    """The nodes of one run of the engine, to be released by whoever has found them.

    Attributes:
        run: the run.
        reach: all that can be reached from its roots.
        nodes: those of them that it will run.
    """

    def __init__(self, run: EngineRun) -> None:
        self.run = run
        self.reach = find_nodes(root_edges(run.roots))
        self.nodes = _find_needed(self.reach, run) if run.inputs else self.reach.nodes

    def release(self) -> None:
        """Let go of the nodes; however deep their graph is, freeing it does not crash."""
        guard_nodes(self.reach.nodes, self.reach.links)
        self.reach, self.nodes = Reach([], set(), array("q")), []


class GraphOutline(NamedTuple):
    """The size and shape of a graph, to tell it from others.

    Attributes:
        nodes: how many there are.
        kinds: the same for graphs of the same kinds of nodes, linked in the same way.
        signs: of its nodes that are no leaves and were in no graph that was outlined before.
        rings: of Python Functions that keep an output as an attribute of ``ctx``, and so themselves: the number of the
            node, and ``Exp.y``.
    """

    nodes: int
    kinds: int
    signs: list[weakref.ref[NodeSign]]
    rings: list[tuple[int, str]]


def outline_graph(roots: Iterable[Any], most: int, look: int, most_signed: int) -> GraphOutline:
    """Outline all that these nodes lead to, themselves counted; ``most`` nodes if there are that many.

    Args:
        roots: the nodes.
        most: nodes that are counted.
        look: what the nodes are signed with.
        most_signed: a graph of more nodes is not signed.
    """
    reach = find_nodes(((node, 0) for node in roots), most)
    if len(reach.nodes) <= most:
        guard_nodes(reach.nodes, reach.links)
    else:
        guard_nodes(reach.nodes)
    signs = sign_nodes(reach.nodes, look) if len(reach.nodes) <= most_signed else []
    kinds = hash((*map(type, reach.nodes), *reach.links))
    return GraphOutline(min(len(reach.nodes), most), kinds, signs, list(_find_rings(reach.nodes)))


def _find_rings(nodes: Iterable[Any]) -> Iterator[tuple[int, str]]:
    for node in filter(is_python, nodes):
        for name, value in list(getattr(node, "__dict__", {}).items()):
            among = value if isinstance(value, list | tuple) else (value,)
            if any(isinstance(each, Tensor) and each.requires_grad and each.grad_fn is node for each in among):
                yield number_of(node), f"{name_of(node).removesuffix('Backward')}.{name}"


class NodeSign:
    """Lives as long as a node: whoever refers to it weakly knows when the node is gone.

    Attributes:
        look: the last at which the node was in the graph of a pass; −1 where there was none.
        number, kind: of the node.
    """

    __slots__ = ("__weakref__", "kind", "look", "number")

    def __init__(self, number: int, kind: str) -> None:
        self.look = -1
        self.number = number
        self.kind = kind


def sign_node(node: Any) -> NodeSign:
    """The sign of a node."""
    found: NodeSign | None = node.metadata.get(_SIGN)
    if found is None:
        found = node.metadata[_SIGN] = NodeSign(number_of(node), type(node).__name__)
    return found


def sign_nodes(nodes: Sequence[Any], look: int) -> list[weakref.ref[NodeSign]]:
    """Sign the nodes of a graph that are no leaves, and return the signs of those that had none of a look before."""
    fresh = []
    for node, number in zip(nodes, number_nodes(list(nodes)), strict=True):
        if number < LEAF_NUMBER:
            sign = sign_node(node)
            if sign.look < 0:
                fresh.append(weakref.ref(sign))
            sign.look = look
    return fresh


def guard_nodes(nodes: Sequence[Any], links: array[int] | None = None) -> None:
    """Keep a graph of which all nodes have been seen from crashing when it is freed.

    Args:
        nodes: a whole graph.
        links: where each leads, if that is known.
    """
    if len(nodes) <= FREE_DEPTH:
        return
    ordered = _order_upwards(nodes, find_nodes((node, 0) for node in nodes).links if links is None else links)
    if not all(map(is_anchored, ordered[-HOLDERS:])):  # else it was seen before, as a whole
        anchor_lists(ordered)


def _order_upwards(nodes: Sequence[Any], links: array[int]) -> list[Any]:
    """The nodes that are no leaves, each behind all that it leads to."""
    order = native.order_upwards if native is not None else order_upwards
    ordered: list[Any] | None = order(list(nodes), links, LEAF_NUMBER)
    if ordered is None:
        ordered = [nodes[place] for place in _sort_by_links(links) if number_of(nodes[place]) < LEAF_NUMBER]
    return ordered


def order_upwards(nodes: list[Any], links: array[int], leaf: int) -> list[Any] | None:
    """The nodes whose number is below that of leaves, by their numbers.

    Returns:
        None where numbers do not fall along all links: several threads have made the nodes.
    """
    numbers = number_nodes(nodes)
    place = 0
    for link in links:
        if link == _END:
            place += 1
        elif link >= 0 and numbers[place] <= numbers[link] < leaf:
            return None
    inner = [place for place, number in enumerate(numbers) if number < leaf]
    return [nodes[place] for place in sorted(inner, key=numbers.__getitem__)]


def _sort_by_links(links: Sequence[int]) -> list[int]:
    edges = [{edge[0] for edge in targets if edge is not None} for targets in read_links(links)]
    waiting = [0] * len(edges)
    for targets in edges:
        for target in targets:
            waiting[target] += 1
    order = [place for place, count in enumerate(waiting) if not count]
    for place in order:  # grows while it is walked
        for target in edges[place]:
            waiting[target] -= 1
            if not waiting[target]:
                order.append(target)
    return order[::-1]


def _find_needed(reach: Reach, run: EngineRun) -> list[Any]:
    """Find the nodes that run when certain gradients are asked for: all that lead to one of them."""
    asked = {(each if not isinstance(each, Tensor) else get_gradient_edge(each))[0] for each in run.inputs}
    leading = find_leading(reach, asked)
    accumulating = asked if run.accumulates else ()
    return [node for place, node in enumerate(reach.nodes) if place in leading or node in accumulating]


def find_leading(reach: Reach, targets: Container[Any]) -> set[int]:
    """Find the places of all nodes from which one or more edges lead to one of these nodes."""
    before: list[list[int]] = [[] for _ in reach.nodes]
    for place, edges in enumerate(read_links(reach.links)):
        for edge in edges:
            if edge is not None:
                before[edge[0]].append(place)
    queue = [place for place, node in enumerate(reach.nodes) if node in targets]
    found, leading = set(queue), set[int]()
    for place in queue:  # grows while it is walked
        for earlier in before[place]:
            leading.add(earlier)
            if earlier not in found:
                found.add(earlier)
                queue.append(earlier)
    return leading


MOST_NODES = 1000
"""Nodes that are looked at."""


def find_leaves(roots: Sequence[Tensor], most: int = 8) -> list[Tensor]:
    """Some leaves of the graph behind these tensors, those nearest to them first."""
    waiting = [node for node, _ in root_edges(roots)]
    seen = set(map(id, waiting))
    found: list[Tensor] = []
    for node in waiting:  # which grows
        leaf = variable_of(node)
        if leaf is not None:
            found.append(leaf)
        if len(found) == most or len(waiting) > MOST_NODES:
            break
        fresh = [after for after, _ in edges_of(node) if after is not None and id(after) not in seen]
        seen.update(map(id, fresh))
        waiting += fresh
    return found


FREE_DEPTH = 400
"""Seen nodes below which recursion is harmless on any stack that torch itself can run on."""

HOLDERS = 8
"""Nodes that are given a list: several, for one whose result is used by nobody dies at once."""

_FEWEST = 50
"""Gathered nodes from which on it is worth to hand them over before their time."""

_KEY = "retrograd.seen_before"


def is_anchored(node: Any) -> bool:
    """Return whether a node holds a list of nodes seen before it."""
    return _KEY in node.metadata


def anchor_lists(nodes: Sequence[Any]) -> None:
    """Anchor lists in a whole graph, so that its nodes are not freed recursively.

    Args:
        nodes: all that are no leaves, each behind all that it leads to.
    """
    for end in range(FREE_DEPTH, len(nodes) + FREE_DEPTH, FREE_DEPTH):
        part = nodes[end - FREE_DEPTH : end]
        middle = len(part) - min(HOLDERS, len(part) // 2)
        below = part[:middle]
        if end > FREE_DEPTH:
            below = [*nodes[end - FREE_DEPTH - HOLDERS : end - FREE_DEPTH], *below]
        for holder in part[middle:]:
            holder.metadata.setdefault(_KEY, []).append(below)


class DeepGraphGuard:
    """Counts the nodes that were seen in one forward, and strings lists through graphs that become deep.

    Attributes:
        count: nodes seen since the graph was begun. Where nodes come by the thousand, the caller may count by itself
            and call ``string`` only beyond ``FREE_DEPTH``.
    """

    __slots__ = ("_seen", "_thread", "count")

    def __init__(self) -> None:
        self.count = 0
        self._seen: list[Any] = []
        self._thread = 0

    def saw(self, node: Any) -> None:
        """Record that Python holds this node; may be called repeatedly, and in any order."""
        self.count += 1
        if self.count > FREE_DEPTH:
            self.string(node)

    def string(self, node: Any) -> None:
        """Gather a node of a graph that is deep; a leaf's is left out, for graphs share it and all of them hold it."""
        if number_of(node) >= LEAF_NUMBER:
            return
        thread = threading.get_ident()
        if thread != self._thread:  # its numbers do not compare with those of another thread
            self._let_go()
            self._thread = thread
        self._seen.append(node)
        if len(self._seen) >= FREE_DEPTH:
            self._hand_over()

    def begin_forward(self, arguments: Any) -> None:
        """A model is called with these: does it go on with the graph that was seen before?"""
        if self.count > FREE_DEPTH and not any(
            tensor.requires_grad and not tensor.is_leaf for _, tensor in flatten(arguments, ())
        ):
            self.part()

    def pause(self) -> None:
        """A forward is over, and the next one may go on with its graph, or the graph may be dropped before it."""
        if len(self._seen) >= _FEWEST:
            self.part()

    def part(self) -> None:
        """A forward begins that does not go on with what was seen before, as far as one can tell."""
        if self._seen:
            self._hand_over()
            self._let_go()

    def restart(self) -> None:
        """Begin a new graph."""
        self.count = 0
        self._let_go()

    def _hand_over(self) -> None:
        nodes = list(dict.fromkeys(sorted(self._seen, key=number_of)))
        middle = len(nodes) - min(HOLDERS, len(nodes) // 2)
        below, self._seen = nodes[:middle], nodes[middle:]
        for holder in self._seen:
            holder.metadata.setdefault(_KEY, []).append(below)

    def _let_go(self) -> None:
        while self._seen:  # nearest node first
            self._seen.pop()
