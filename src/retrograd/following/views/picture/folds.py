"""The nodes of a graph by the module that made them: a tree of folds, each of which can be open or closed.

A fold stands for one call of one module. What lies in it is in the order in which the backward runs it. Leaves are in
no fold: each belongs to the nodes that give it its gradient.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from retrograd.core.sites.site import ROOT
from retrograd.following.graph.graph import order_of_run
from retrograd.following.graph.node import Edge, Node, TensorInfo
from retrograd.following.graph.walker import as_graph

if TYPE_CHECKING:
    from torch import Tensor

Drawable: TypeAlias = "Iterable[Node] | Tensor | Sequence[Tensor]"

_BITS = re.compile(r"[a-z]+(\d+)")

Gradient = tuple[int, int]
"""A place where gradients arrive: index of the node that takes them, and the slot."""

Call = tuple[str, int]
"""A module's path, and which call of it."""


@dataclass(slots=True, eq=False)
class Fold:
    """One call of a module, or a stretch of a list that is too long to look at.

    Attributes:
        path: of the module; empty for the whole graph.
        call: which call of it.
        title: its name inside the fold above.
        parts: the folds and nodes right in it, in the order in which the backward begins them.
        is_stretch: whether it is a stretch of its module's parts and no module.
        above: the fold that it is in.
        count: nodes in it, those in its folds included; leaves are not counted.
        kinds: how many there are of each kind.
        leaves: indices of the leaves that get a gradient from it.
        parameters: elements of those leaves.
        saved: bytes of the tensors its nodes have saved; one that two nodes saved counts twice.
    """

    path: str
    call: int
    title: str
    parts: list[Fold | Node] = field(default_factory=list)
    is_stretch: bool = False
    above: Fold | None = None
    count: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    leaves: dict[int, None] = field(default_factory=dict)
    parameters: int = 0
    saved: int = 0

    @property
    def only_node(self) -> Node | None:
        """The node in it where there is but one: the closed fold says all of it, so only a click opens it."""
        part = self.parts[0] if self.count == 1 else None
        return part.only_node if isinstance(part, Fold) else part

    @property
    def folds(self) -> Iterator[Fold]:
        """The folds right in it."""
        return (part for part in self.parts if isinstance(part, Fold))


@dataclass(frozen=True, slots=True)
class Outline:
    """A graph by modules.

    Attributes:
        nodes: all of it, by index.
        top: the fold of everything.
        homes: index of a node → the fold right around it. Leaves have none.
        places: index of a node → when the backward runs it, counted from 0.
        leaves: index of a node → the leaves that it gives gradients to.
        roots: where the backward begins.
    """

    nodes: list[Node]
    top: Fold
    homes: dict[int, Fold]
    places: dict[int, int]
    leaves: dict[int, list[Node]]
    roots: tuple[Edge, ...]


def make_outline(graph: Drawable, *, most: int | None = None) -> Outline:
    """Sort the nodes of a graph into folds.

    Args:
        graph: the graph; or a tensor that has one, or several, which are walked then.
        most: how many parts a fold may have; longer lists are cut into stretches. None: as many as there are.
    """
    graph = as_graph(graph)
    nodes = list(graph)
    roots = tuple(getattr(graph, "roots", ()))
    order = order_nodes(nodes, roots)
    calls = _Calls(nodes)
    top = Fold("", 1, "")
    folds: dict[Call, Fold] = {("", 1): top}
    for index in order:
        _open(folds, calls, calls.of(nodes[index])).parts.append(nodes[index])
    _join_chains(top)
    if most is not None:
        _cut_long_lists(top, most)
    leaves = _find_leaves(nodes, order)
    homes = dict(_link(top))
    _count(top, nodes, leaves)
    places = {index: place for place, index in enumerate(order)}
    return Outline(nodes, top, homes, places, leaves, roots)


def order_nodes(nodes: Sequence[Node], roots: Sequence[Edge] = ()) -> list[int]:
    """Indices of all nodes but leaves in the order in which the engine runs them.

    Args:
        nodes: those of a graph.
        roots: where the backward begins; where nobody says, at the nodes that no other leads to.
    """
    edges = [node.edges for node in nodes]
    reached = {edge.node for each in (roots, *edges) for edge in each if edge is not None}
    starts = [*roots, *(Edge(node.index, 0) for node in nodes if node.index not in reached)]
    numbers = [node.number if node.is_leaf else node.number or 0 for node in nodes]
    return [index for index in order_of_run(numbers, edges, starts) if not nodes[index].is_leaf]


def shown_parts(fold: Fold, depth: int) -> Iterator[Fold | Node]:
    """List what is seen when folds are open down to a depth: nodes and closed folds."""
    for part in fold.parts:
        if isinstance(part, Fold) and depth > 1 and part.only_node is None:
            yield from shown_parts(part, depth - 1)
        else:
            yield part


def choose_depth(top: Fold, most: int) -> int:
    """The largest depth at which no more than so many boxes are to be seen; at least 1."""
    depth, deepest = 1, _deepest(top)
    while depth < deepest and sum(1 for _ in shown_parts(top, depth + 1)) <= most:
        depth += 1
    return depth


def _deepest(top: Fold) -> int:
    depth, folds = 1, list(top.folds)
    while folds:
        depth += 1
        folds = [inner for fold in folds for inner in fold.folds]
    return depth


class _Calls:
    """Calls of modules: that of a node, and that around another call."""

    def __init__(self, nodes: list[Node]) -> None:
        self._spans: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
        for node in nodes:
            if not node.is_leaf and _path_of(node):
                self._see(_path_of(node), node.call, node.number or 0)
        self._counts = self._count_calls()

    def of(self, node: Node) -> Call:
        path = _path_of(node)
        return (path, node.call) if path else ("", 1)

    def above(self, call: Call) -> Call:
        """The call of the module above in which this one happened.

        What a module without nodes of its own (an ``nn.Sequential``) made cannot be known from the nodes: its calls are
        as many as those of the part of it that was called least.
        """
        path, number = call
        above = path.rpartition(".")[0]
        if not above:
            return "", 1
        spans = self._spans.get(above)
        own = self._spans.get(path, {}).get(number)
        if spans is None or own is None:
            return above, (number - 1) * self._counts[above] // self._counts[path] + 1
        first, last = own
        return above, min(spans, key=lambda each: (max(spans[each][0] - last, first - spans[each][1], 0), each))

    def _see(self, path: str, call: int, number: int) -> None:
        first, last = self._spans[path].get(call, (number, number))
        self._spans[path][call] = min(first, number), max(last, number)

    def _count_calls(self) -> dict[str, int]:
        counts = {path: max(spans) for path, spans in self._spans.items()}
        silent: dict[str, int] = {}
        for path in sorted(self._spans, key=lambda path: -path.count(".")):
            above, least = path.rpartition(".")[0], counts[path]
            while above and above not in counts:
                silent[above] = least = min(silent.get(above, least), least)
                above = above.rpartition(".")[0]
        return counts | silent


def _path_of(node: Node) -> str:
    return "" if node.module in (None, ROOT) else str(node.module)


def _open(folds: dict[Call, Fold], calls: _Calls, call: Call) -> Fold:
    """The fold of a call; made, with those above it, where it is new."""
    made = []
    while call not in folds:
        path, number = call
        folds[call] = Fold(path, number, _title(path, number))
        made.append((call, call := calls.above(call)))
    fold = folds[call]
    for inner, outer in reversed(made):
        fold = folds[inner]
        folds[outer].parts.append(fold)
    return fold


def _title(path: str, number: int) -> str:
    """The last name of a path, as in ``attn#2``; a number alone says too little, so it becomes ``blocks.3``."""
    *above, last = path.split(".")
    name = f"{above[-1]}.{last}" if last.isdigit() and above else last
    return f"{name}#{number}" if number > 1 else name


def _join_chains(fold: Fold) -> None:
    """A fold in which there is but one other becomes one with it: ``transformer.h``."""
    stack = [fold]
    while stack:
        fold = stack.pop()
        for i, part in enumerate(fold.parts):
            if isinstance(part, Fold):
                fold.parts[i] = inner = _join_chain(part)
                stack.append(inner)


def _join_chain(fold: Fold) -> Fold:
    while len(fold.parts) == 1 and isinstance(inner := fold.parts[0], Fold):
        inner.title = f"{fold.title}.{inner.title.removeprefix(fold.title + '.')}"
        fold = inner
    return fold


def _cut_long_lists(fold: Fold, most: int) -> None:
    stack = [fold]
    while stack:
        fold = stack.pop()
        count = len(fold.parts)
        if count > most:
            levels = math.ceil(math.log(count) / math.log(most))
            size = math.ceil(count / math.ceil(count ** (1 / levels)))
            first = 1 if not fold.is_stretch else int(fold.title.split(" ")[0].replace(",", ""))
            fold.parts = [_cut(fold, i, size, first) for i in range(0, count, size)]
        stack.extend(fold.folds)


def _cut(fold: Fold, begin: int, size: int, first: int) -> Fold:
    parts = fold.parts[begin : begin + size]
    title = f"{first + begin:,} to {first + begin + len(parts) - 1:,}"
    return Fold(fold.path, fold.call, title, parts, is_stretch=True)


def _link(top: Fold) -> Iterator[tuple[int, Fold]]:
    stack = [top]
    while stack:
        fold = stack.pop()
        for part in fold.parts:
            if isinstance(part, Fold):
                part.above = fold
                stack.append(part)
            else:
                yield part.index, fold


def _find_leaves(nodes: list[Node], order: list[int]) -> dict[int, list[Node]]:
    leaves: dict[int, list[Node]] = {}
    for index in order:
        reached = dict.fromkeys(edge.node for edge in nodes[index].edges if edge is not None)
        found = [nodes[leaf] for leaf in reached if nodes[leaf].is_leaf]
        if found:
            leaves[index] = found
    return leaves


def _count(top: Fold, nodes: list[Node], leaves: dict[int, list[Node]]) -> None:
    """Add up, the innermost folds first."""
    folds = [top]
    for fold in folds:
        folds.extend(fold.folds)
    for fold in reversed(folds):
        for part in fold.parts:
            if isinstance(part, Fold):
                fold.count += part.count
                fold.kinds.update(part.kinds)
                fold.leaves |= part.leaves
                fold.saved += part.saved
            else:
                fold.count += 1
                fold.kinds[part.name] += 1
                fold.leaves |= dict.fromkeys(leaf.index for leaf in leaves.get(part.index, ()))
                fold.saved += sum(_bytes_of(saved.tensor) for saved in part.saved)
        fold.parameters = sum(_elements_of(nodes[leaf].incoming[0]) for leaf in fold.leaves if nodes[leaf].incoming)


def _elements_of(info: TensorInfo | None) -> int:
    """Elements of a tensor; 0 where nothing is known of it."""
    return 0 if info is None else math.prod(info.shape)


def _bytes_of(info: TensorInfo | None) -> int:
    """Bytes of a tensor's elements, by the digits in the name of its type; one byte where there are none (bool)."""
    if info is None:
        return 0
    bits = _BITS.match(info.dtype)
    return math.prod(info.shape) * (int(bits[1]) // 8 if bits else 1)
