"""All that a picture may show: a sheet for each fold that can be open.

A sheet shows the parts of its fold, and the gradients that pass between them and over its border. A gradient is a place
where gradients arrive: a node and a slot. What several nodes send there is added up, so it crosses the border of a fold
at one point, its port.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache

from retrograd.following.graph.node import Node
from retrograd.following.views.picture.folds import Fold, Gradient, Outline
from retrograd.following.views.picture.layers import Arrangement, arrange
from retrograd.following.views.picture.words import Box, clean, make_box

PORT = 12.0
LABEL_LINE, LABEL_FOOT = 13.0, 11.0

Part = Fold | int
"""A fold, or the index of a node."""


@dataclass(frozen=True, slots=True)
class Port:
    """A place at which a gradient crosses the border of a fold.

    Attributes:
        gradient: which.
        enters: whether it comes in (at the top) or goes out (at the bottom).
    """

    gradient: Gradient
    enters: bool


@dataclass(slots=True)
class Inside:
    """The inside of an open fold.

    Attributes:
        links: pair of things in it that gradients pass between → those gradients.
    """

    links: dict[tuple[Part | Port, Part | Port], dict[Gradient, None]] = field(default_factory=dict)

    @property
    def ports(self) -> dict[Port, None]:
        """All gradients over the border."""
        return {end: None for link in self.links for end in link if isinstance(end, Port)}


def look_inside(outline: Outline, folds: Iterable[Fold]) -> dict[Fold, Inside]:
    """The insides of these folds."""
    insides = {fold: Inside() for fold in folds}
    for sender, gradient in _list_gradients(outline):
        for fold, link in _pieces(outline, sender, gradient):
            inside = insides.get(fold)
            if inside is not None:
                inside.links.setdefault(link, {})[gradient] = None
    return insides


def _list_gradients(outline: Outline) -> Iterator[tuple[int | None, Gradient]]:
    """Every edge that leads to no leaf: the node that sends (None: the caller of the backward), what is sent."""
    inner = outline.homes
    for root in outline.roots:
        if root.node in inner:
            yield None, (root.node, root.slot)
    for index in outline.places:
        for edge in outline.nodes[index].edges:
            if edge is not None and edge.node in inner:
                yield index, (edge.node, edge.slot)


def _pieces(
    outline: Outline, sender: int | None, gradient: Gradient
) -> Iterator[tuple[Fold, tuple[Part | Port, Part | Port]]]:
    """The pieces of an edge: out of the sender's folds, across the innermost fold that has both, into the taker's."""
    ups = _chain(outline, sender) if sender is not None else []
    downs = _chain(outline, gradient[0])
    while ups and downs and ups[-1] == downs[-1]:
        ups.pop()
        downs.pop()
    for fold, part in ups[:-1]:
        yield fold, (part, Port(gradient, enters=False))
    common, taker = downs[-1]
    yield common, (ups[-1][1] if ups else Port(gradient, enters=True), taker)
    for fold, part in downs[:-1]:
        yield fold, (Port(gradient, enters=True), part)


def _chain(outline: Outline, index: int) -> list[tuple[Fold, Part]]:
    """The folds around a node, innermost first, each with its part that the node is in."""
    chain: list[tuple[Fold, Part]] = []
    fold, part = outline.homes[index], index
    above: Part = part
    while True:
        chain.append((fold, above))
        if fold.above is None:
            return chain
        above, fold = fold, fold.above


def key_of(part: Fold | Node) -> Part:
    """The key by which links name a part."""
    return part if isinstance(part, Fold) else part.index


@dataclass(frozen=True, slots=True)
class Thing:
    """Something on a sheet: a box, or a port in the sheet's border.

    Attributes:
        content: a fold, a node or a port.
        box: what is drawn; None for a port.
    """

    content: Fold | Node | Port
    box: Box | None = None

    @property
    def head(self) -> float:
        """Height of the labels above it."""
        return LABEL_FOOT + LABEL_LINE * len(self.box.labels) if self.box and self.box.labels else 0.0

    @property
    def name(self) -> str:
        """Name that is the same in every picture of the same graph: ``n12``, ``in-12-0``, ``blocks.3``."""
        match self.content:
            case Port(gradient=(node, slot), enters=enters):
                return f"{'in' if enters else 'out'}-{node}-{slot}"
            case Fold() as fold:
                return name_fold(fold)
            case Node() as node:
                return f"n{node.index}"


@dataclass(frozen=True, slots=True)
class Connector:
    """A line between things.

    Attributes:
        sender, taker: places in the list of things.
        chain: what it passes, from top to bottom, both ends included.
        turned: whether it runs upwards.
        gradients: what goes along it.
    """

    sender: int
    taker: int
    chain: tuple[int, ...]
    turned: bool
    gradients: tuple[Gradient, ...]


@dataclass(frozen=True, slots=True)
class Sheet:
    """The inside of a fold, laid out as it is when everything in it is closed.

    Attributes:
        fold: whose.
        things: what is on it.
        rows: places in the list of things; larger numbers are bends of lines.
        row_of: in which row each of them is.
        xs: where its middle is.
        lines: what gradients go along.
    """

    fold: Fold
    things: list[Thing]
    rows: list[list[int]]
    row_of: list[int]
    xs: list[float]
    lines: list[Connector]


@dataclass(frozen=True, slots=True)
class Scene:
    """Sheets of a graph.

    Attributes:
        outline: the graph.
        sheets: of each fold that can be open, the top first.
        usual: the type of tensors that labels leave out.
    """

    outline: Outline
    sheets: dict[Fold, Sheet]
    usual: str


def name_fold(fold: Fold) -> str:
    """A name that no other fold has: the path, the call, and the stretch of its parts."""
    if fold.is_stretch and fold.above is not None:
        return f"{name_fold(fold.above)}@{fold.title}"
    return f"{clean(fold.path) or 'self'}#{fold.call}"


def make_scene(outline: Outline, folds: Iterable[Fold]) -> Scene:
    """Lay out the insides of some folds."""
    usual = find_usual_type(outline.nodes)
    insides = look_inside(outline, folds)
    known = cache(arrange)  # layers of a deep net are alike
    sheets = {fold: _lay_out(outline, fold, inside, usual, known) for fold, inside in insides.items()}
    return Scene(outline, sheets, usual)


def list_folds(top: Fold, most: int | None = None) -> Iterator[Fold]:
    """Folds from the outside in, until they have so many parts together."""
    here, parts = [top], 0
    while here:
        for fold in here:
            parts += len(fold.parts)
            if most is None or parts <= most:
                yield fold
        here = [inner for fold in here for inner in fold.folds]


def list_opened(top: Fold, depth: int) -> list[Fold]:
    """The folds that are open down to a depth, from the outside in; those with a single node stay closed."""
    opened, here = [], [top]
    while here and depth > 0:
        opened += here
        here = [inner for fold in here for inner in fold.folds if inner.only_node is None]
        depth -= 1
    return opened


def find_usual_type(nodes: list[Node]) -> str:
    """The type that most gradients have."""
    types = Counter(info.dtype for node in nodes for info in node.incoming if info is not None)
    return max(types, key=lambda name: (types[name], name), default="")


def _lay_out(outline: Outline, fold: Fold, inside: Inside, usual: str, arrange: Callable[..., Arrangement]) -> Sheet:
    ports = list(inside.ports)
    enter, leave = [port for port in ports if port.enters], [port for port in ports if not port.enters]
    contents: list[Fold | Node | Port] = [*enter, *fold.parts, *leave]
    numbers = {_key(content): number for number, content in enumerate(contents)}
    lines = [(numbers[a], numbers[b]) for a, b in inside.links]
    arriving: dict[int, dict[Gradient, None]] = {}
    for (_, b), gradients in zip(lines, inside.links.values(), strict=True):
        arriving.setdefault(b, {}).update(gradients)
    things = [
        Thing(content, None if isinstance(content, Port) else make_box(outline, content, arriving.get(i, ()), usual))
        for i, content in enumerate(contents)
    ]
    widths = tuple(PORT if thing.box is None else thing.box.width for thing in things)
    arrangement = arrange(widths, tuple(lines), first=len(enter), last=len(leave))
    drawn = zip(lines, arrangement.chains, arrangement.turned, inside.links.values(), strict=True)
    return Sheet(
        fold,
        things,
        arrangement.rows,
        arrangement.row_of,
        arrangement.xs,
        [Connector(a, b, tuple(chain), turned, tuple(gradients)) for (a, b), chain, turned, gradients in drawn],
    )


def _key(content: Fold | Node | Port) -> Part | Port:
    return content if isinstance(content, Port) else key_of(content)
