"""What a fold shows when it is open: its parts, and the gradients that pass between them and over its border.

A gradient is a place where gradients arrive: a node and a slot. What several nodes send there is added up, so it
crosses the border of a fold at one point, its port.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from retrograd.graph.node import Node
from retrograd.views.picture.folds import Fold, Outline

Gradient = tuple[int, int]
"""Index of the node that takes it, and the slot."""

Part = Fold | int
"""A fold, or the index of a node."""


@dataclass(frozen=True, slots=True)
class Port:
    """Where a gradient crosses the border of a fold.

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
    """How links name a part."""
    return part if isinstance(part, Fold) else part.index
