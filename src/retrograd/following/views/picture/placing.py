"""Coordinates: where the things of a sheet stand when some of its folds are open.

A sheet is laid out with all of its folds closed; one that is open pushes aside and down what is in its way.
``js/place.js`` does the same for the page, line by line; a test holds one against the other.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby, pairwise

from retrograd.following.views.picture.folds import Fold
from retrograd.following.views.picture.layers import BEND, SPACE
from retrograd.following.views.picture.scene import PORT, Scene, Sheet
from retrograd.following.views.picture.words import LETTER, TITLE

Gate = tuple[int, int, bool]
"""A gradient (node and slot), and whether it enters."""

SIDE, HEAD, FOOT, GAP = 20.0, 30.0, 20.0, 18.0


@dataclass(frozen=True, slots=True)
class Spot:
    """The place of a thing: where lines end at it, its top, how far it reaches left and right of there, its height."""

    x: float
    y: float
    left: float
    right: float
    height: float


@dataclass(frozen=True, slots=True)
class Placed:
    """A sheet with coordinates, from its own upper left corner.

    Attributes:
        sheet: which.
        width, height: of all of it.
        spots: of the things, then of the bends.
        heads, tops, bottoms: of the rows: where lines stop to bend, where boxes begin and end.
        inner: those folds on it that are open.
        gates: where gradients cross its border.
    """

    sheet: Sheet
    width: float
    height: float
    spots: list[Spot]
    heads: list[float]
    tops: list[float]
    bottoms: list[float]
    inner: dict[int, Placed]
    gates: dict[Gate, float]


def place(scene: Scene, fold: Fold, opened: AbstractSet[Fold]) -> Placed:
    """Place the inside of a fold, and what is open in it."""
    sheet = scene.sheets[fold]
    inner = {i: place(scene, t.content, opened) for i, t in enumerate(sheet.things) if t.content in opened}  # type: ignore[arg-type]
    sizes = [_measure(sheet, i, inner.get(i)) for i in range(len(sheet.xs))]
    xs = _stretch(sheet, sizes, inner)
    heads, tops, bottoms, height = _stack(sheet, sizes, xs)
    first = min((x - left for x, (left, _, _) in zip(xs, sizes, strict=True)), default=0.0)
    last = max((x + right for x, (_, right, _) in zip(xs, sizes, strict=True)), default=0.0)
    width = max(last - first + 2 * SIDE, 2 * (len(sheet.fold.title) * LETTER * TITLE + 28))
    shift = (width - (last - first)) / 2 - first
    spots = [Spot(x + shift, tops[sheet.row_of[i]], *sizes[i]) for i, x in enumerate(xs)]
    gates = {(*t.content.gradient, t.content.enters): spots[i].x for i, t in enumerate(sheet.things) if t.box is None}  # type: ignore[union-attr]
    return Placed(sheet, width, height, spots, heads, tops, bottoms, inner, gates)


def _measure(sheet: Sheet, number: int, inner: Placed | None) -> tuple[float, float, float]:
    """How far a thing reaches to the left and right of where lines end at it, and its height.

    That is the middle, or of an open fold the gates at which gradients enter.
    """
    if inner is not None:
        gates = [x for (_, _, enters), x in inner.gates.items() if enters]
        left = sum(gates) / len(gates) if gates else inner.width / 2
        return left, inner.width - left, inner.height
    box = sheet.things[number].box if number < len(sheet.things) else None
    if box is not None:
        return box.width / 2, box.width / 2, box.height
    half = (PORT if number < len(sheet.things) else BEND) / 2
    return half, half, 0.0


def _stretch(sheet: Sheet, sizes: list[tuple[float, float, float]], inner: dict[int, Placed]) -> list[float]:
    """Horizontal places with room for open folds. What stands in one column still does."""
    xs, moved = list(sheet.xs), 0.0
    before = {b: a for row in sheet.rows for a, b in pairwise(row)}
    for _, column in groupby(sorted(range(len(xs)), key=sheet.xs.__getitem__), sheet.xs.__getitem__):
        numbers = list(column)
        for b in numbers:
            a = before.get(b)
            if a is not None and (a in inner or b in inner):
                moved = max(moved, xs[a] + sizes[a][1] + SPACE + sizes[b][0] - sheet.xs[b])
        for number in numbers:
            xs[number] += moved
    return xs


def _stack(
    sheet: Sheet, sizes: list[tuple[float, float, float]], xs: list[float]
) -> tuple[list[float], list[float], list[float], float]:
    """Vertical places of the rows, and the height of all. Rows stand further apart where lines go far sideways."""
    sideways = [0.0] * len(sheet.rows)
    for line in sheet.lines:
        for a, b in pairwise(line.chain):
            sideways[sheet.row_of[b]] = max(sideways[sheet.row_of[b]], abs(xs[a] - xs[b]))
    heads: list[float] = []
    tops: list[float] = []
    bottoms: list[float] = []
    y, ports = 0.0, False
    for r, row in enumerate(sheet.rows):
        things = [sheet.things[number] for number in row if number < len(sheet.things)]
        ports = any(thing.box is None for thing in things)
        if r == 0:
            y = 0.0 if ports else HEAD
        else:
            y += GAP + min(sideways[r] * 0.12, 70.0) + (14.0 if r == 1 and tops[0] == 0.0 else 0.0)
        heads.append(y)
        y += max((thing.head for thing in things), default=0.0)
        tops.append(y)
        y += max(sizes[number][2] for number in row)
        bottoms.append(y)
    return heads, tops, bottoms, y if ports and len(sheet.rows) > 1 else y + FOOT
