"""Coordinates: where the things of a sheet stand when some of its folds are open.

``js/place.js`` does the same for the page, line by line; a test holds one against the other.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise

from retrograd.following.views.picture.folds import Fold
from retrograd.following.views.picture.scene import Connector, Scene, Sheet
from retrograd.following.views.picture.words import LETTER, TITLE

Gate = tuple[int, int, bool]
"""A gradient (node and slot), and whether it enters."""

BEND, PORT = 14.0, 12.0
SPACE, SIDE, HEAD, FOOT = 26.0, 20.0, 30.0, 20.0
GAP, LABEL_LINE, LABEL_FOOT = 18.0, 13.0, 11.0
_SWEEPS, _FREE_SWEEPS = 12, 6
_THING, _BEND, _END = 0, 1, 2
_WEIGHTS = (1000.0, 1.0, 0.3)
_NO_WEIGHT = 0.01


@dataclass(frozen=True, slots=True)
class Spot:
    """The place of a thing: its middle, its top, and its size."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Placed:
    """A sheet with coordinates, from its own upper left corner.

    Attributes:
        sheet: which.
        width, height: of all of it.
        spots: of the things, then of the bends.
        heads, tops, bottoms: of the rows: where lines stop to bend, where boxes begin and end.
        row_of: in which row a thing or bend is.
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
    row_of: list[int]
    inner: dict[int, Placed]
    gates: dict[Gate, float]


@dataclass(frozen=True, slots=True)
class _Tie:
    """A piece of a line from one row to the next: what it joins, and where it is fixed, from their middles."""

    upper: int
    lower: int
    upper_end: float
    lower_end: float


def place(scene: Scene, fold: Fold, opened: AbstractSet[Fold]) -> Placed:
    """Place the inside of a fold, and what is open in it."""
    sheet = scene.sheets[fold]
    inner = {i: place(scene, t.content, opened) for i, t in enumerate(sheet.things) if t.content in opened}  # type: ignore[arg-type]
    sizes = _measure(sheet, inner)
    row_of = [0] * len(sizes)
    for r, row in enumerate(sheet.rows):
        for number in row:
            row_of[number] = r
    ties = _tie(sheet, inner, sizes, row_of)
    xs = _spread(sheet, sizes, ties)
    heads, tops, bottoms, height = _stack(sheet, sizes, xs, ties, row_of)
    left = min((xs[i] - sizes[i][0] / 2 for i in range(len(sizes))), default=0.0)
    right = max((xs[i] + sizes[i][0] / 2 for i in range(len(sizes))), default=0.0)
    width = max(right - left + 2 * SIDE, 2 * (len(sheet.fold.title) * LETTER * TITLE + 28))
    shift = (width - (right - left)) / 2 - left
    spots = [Spot(xs[i] + shift, tops[row_of[i]], *sizes[i]) for i in range(len(sizes))]
    gates = {(*t.content.gradient, t.content.enters): spots[i].x for i, t in enumerate(sheet.things) if t.box is None}  # type: ignore[union-attr]
    return Placed(sheet, width, height, spots, heads, tops, bottoms, row_of, inner, gates)


def _measure(sheet: Sheet, inner: dict[int, Placed]) -> list[tuple[float, float]]:
    sizes = []
    for i, thing in enumerate(sheet.things):
        if i in inner:
            sizes.append((inner[i].width, inner[i].height))
        else:
            sizes.append((thing.box.width, thing.box.height) if thing.box is not None else (PORT, 0.0))
    return sizes + [(BEND, 0.0)] * (sum(map(len, sheet.rows)) - len(sizes))


def _tie(sheet: Sheet, inner: dict[int, Placed], sizes: list[tuple[float, float]], row_of: list[int]) -> list[_Tie]:
    ties = []
    for line in sheet.lines:
        ends = {line.sender: _end(line, line.sender, inner, sizes, False)}
        ends[line.taker] = _end(line, line.taker, inner, sizes, True)
        for a, b in pairwise(line.chain):
            if row_of[b] == row_of[a] + 1:
                ties.append(_Tie(a, b, ends.get(a, 0.0), ends.get(b, 0.0)))
    return ties


def _end(
    line: Connector, number: int, inner: dict[int, Placed], sizes: list[tuple[float, float]], enters: bool
) -> float:
    """Distance from the middle of a thing to the end of a line: at the gates of an open fold."""
    if number not in inner:
        return 0.0
    gates = [inner[number].gates[node, slot, enters] for node, slot in line.gradients]
    return sum(gates) / len(gates) - sizes[number][0] / 2


def _spread(sheet: Sheet, sizes: list[tuple[float, float]], ties: list[_Tie]) -> list[float]:
    """Horizontal places: pulled to neighbours from above, then from below, again and again."""
    xs = [0.0] * len(sizes)
    up: list[list[_Tie]] = [[] for _ in sizes]
    down: list[list[_Tie]] = [[] for _ in sizes]
    for tie in ties:
        up[tie.lower].append(tie)
        down[tie.upper].append(tie)
    kinds = [_kind(i, len(sheet.things), bool(up[i]), bool(down[i])) for i in range(len(sizes))]
    for row in sheet.rows:
        _settle(row, [0.0] * len(row), [1.0] * len(row), sizes, kinds, xs)
    for sweep in range(_SWEEPS):
        downwards = sweep % 2 == 0
        for row in sheet.rows[1:] if downwards else sheet.rows[-2::-1]:
            wanted, weights = [], []
            for number in row:
                near = _pull(number, up[number] if downwards else down[number], xs, kinds, sweep >= _FREE_SWEEPS)
                wanted.append(xs[number] if near is None else near)
                weights.append(_NO_WEIGHT if near is None else _WEIGHTS[kinds[number]])
            _settle(row, wanted, weights, sizes, kinds, xs)
    return xs


def _kind(number: int, count: int, has_upper: bool, has_lower: bool) -> int:
    """A thing, a bend, or a thing at which the way ends: it gives way to the others."""
    if number >= count:
        return _BEND
    return _END if has_upper and not has_lower else _THING


def _pull(number: int, ties: list[_Tie], xs: list[float], kinds: list[int], is_late: bool) -> float | None:
    """The place that neighbours want for it: the median of those that matter most to it.

    To a bend bends do, so that long lines are straight; late on, one without bends next to it stays where it is.
    """
    wanted: list[list[float]] = [[], [], []]
    for tie in ties:
        below = tie.lower == number
        other = tie.upper if below else tie.lower
        wanted[kinds[other]].append(
            xs[other] + (tie.upper_end - tie.lower_end if below else tie.lower_end - tie.upper_end)
        )
    if kinds[number] == _BEND:
        chosen = wanted[_BEND] or ([] if is_late else wanted[_THING] or wanted[_END])
    else:
        chosen = wanted[_THING] or wanted[_BEND] or wanted[_END]
    if not chosen:
        return None
    chosen.sort()
    middle = len(chosen) // 2
    return chosen[middle] if len(chosen) % 2 else (chosen[middle - 1] + chosen[middle]) / 2


def _settle(
    row: list[int],
    wanted: list[float],
    weights: list[float],
    sizes: list[tuple[float, float]],
    kinds: list[int],
    xs: list[float],
) -> None:
    """Place things near their wanted places without overlaps: least squares, by pooling neighbours that collide."""
    offsets, offset = [], 0.0
    for i, number in enumerate(row):
        if i:
            space = 4.0 if kinds[number] == _BEND == kinds[row[i - 1]] else SPACE
            offset += (sizes[row[i - 1]][0] + sizes[number][0]) / 2 + space
        offsets.append(offset)
    pools: list[list[float]] = []  # weighted sum, weight, how many
    for i in range(len(row)):
        pools.append([(wanted[i] - offsets[i]) * weights[i], weights[i], 1])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            total, weight, members = pools.pop()
            pools[-1][0] += total
            pools[-1][1] += weight
            pools[-1][2] += members
    i = 0
    for total, weight, members in pools:
        for _ in range(int(members)):
            xs[row[i]] = total / weight + offsets[i]
            i += 1


def _stack(
    sheet: Sheet, sizes: list[tuple[float, float]], xs: list[float], ties: list[_Tie], row_of: list[int]
) -> tuple[list[float], list[float], list[float], float]:
    """Vertical places of the rows, and the height of all. Rows stand further apart where lines go far sideways."""
    sideways = [0.0] * len(sheet.rows)
    for tie in ties:
        r = row_of[tie.lower]
        sideways[r] = max(sideways[r], abs(xs[tie.upper] + tie.upper_end - xs[tie.lower] - tie.lower_end))
    heads: list[float] = []
    tops: list[float] = []
    bottoms: list[float] = []
    y, ports = 0.0, False
    for r, row in enumerate(sheet.rows):
        things = [sheet.things[number] for number in row if number < len(sheet.things)]
        labels = max((len(thing.box.labels) for thing in things if thing.box is not None), default=0)
        ports = any(thing.box is None for thing in things)
        if r == 0:
            y = 0.0 if ports else HEAD
        else:
            y += GAP + min(sideways[r] * 0.12, 70.0) + (14.0 if r == 1 and tops[0] == 0.0 else 0.0)
        heads.append(y)
        y += LABEL_FOOT + LABEL_LINE * labels if labels else 0.0
        tops.append(y)
        y += max(sizes[number][1] for number in row)
        bottoms.append(y)
    return heads, tops, bottoms, y if ports and len(sheet.rows) > 1 else y + FOOT
