"""A layered layout: which row each thing is in, and where in the row.

Sugiyama's method: lines that close a circle are turned round, rows by the longest path, long lines get a bend in every
row that they pass, rows are sorted by the barycentre of their neighbours until there are no fewer crossings, and things
are pulled to the median of their neighbours.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

BEND, SPACE = 14.0, 26.0
_SWEEPS = 4
_PULLS = 3
_MOST_BENDS = 4000
_THING, _BEND, _END = 0, 1, 2
_WEIGHTS = (1000.0, 1.0, 0.3)
_NO_WEIGHT = 0.01


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Rows of things, from top to bottom.

    Attributes:
        rows: numbers of the things in each row, from left to right. Numbers from the count of things on are bends.
        row_of: in which row each thing or bend is.
        xs: where its middle is.
        chains: for each line what it passes, from top to bottom, both ends included.
        turned: for each line whether it runs upwards.
    """

    rows: list[list[int]]
    row_of: list[int]
    xs: list[float]
    chains: list[list[int]]
    turned: list[bool]


def arrange(widths: Sequence[float], lines: Sequence[tuple[int, int]], *, first: int = 0, last: int = 0) -> Arrangement:
    """Lay out things and the lines between them.

    Args:
        widths: of the things, whose numbers are in the order in which they would be drawn best.
        lines: pairs of numbers: from, to.
        first: how many of them (those with the smallest numbers) stand in a row of their own at the top.
        last: how many of them (those with the largest numbers) stand in a row of their own at the bottom.
    """
    count = len(widths)
    turned = _break_circles(count, lines)
    down = [(b, a) if back else (a, b) for (a, b), back in zip(lines, turned, strict=True)]
    chains, row_of = _bend(down, _rank(count, down, first, last))
    columns = _Columns([*widths, *[BEND] * (len(row_of) - count)], count, row_of, chains)
    columns.sort()
    columns.spread()
    return Arrangement(columns.rows, row_of, [round(x, 1) for x in columns.xs], chains, turned)


def _break_circles(count: int, lines: Sequence[tuple[int, int]]) -> list[bool]:
    """Turn lines round so that no circle is left: those into the first thing that waits for itself."""
    into: list[list[int]] = [[] for _ in range(count)]
    out: list[list[int]] = [[] for _ in range(count)]
    for i, (a, b) in enumerate(lines):
        into[b].append(i)
        out[a].append(i)
    turned, done = [False] * len(lines), [False] * count
    waiting = [len(each) for each in into]
    ready = [number for number in range(count) if not waiting[number]]
    rest = iter(range(count))
    for _ in range(count):
        number = heapq.heappop(ready) if ready else next(n for n in rest if not done[n])
        done[number] = True
        for i in into[number]:
            turned[i] = not done[lines[i][0]]
        for i in out[number]:
            other = lines[i][1]
            waiting[other] -= 1
            if not waiting[other] and not done[other]:
                heapq.heappush(ready, other)
    return turned


def _rank(count: int, lines: Sequence[tuple[int, int]], first: int, last: int) -> list[int]:
    """The longest way from the top."""
    out: dict[int, list[int]] = defaultdict(list)
    waiting = [0] * count
    for a, b in lines:
        out[a].append(b)
        waiting[b] += 1
    ranks = [0 if number < first or not first else 1 for number in range(count)]
    ready = [number for number in range(count) if not waiting[number]]
    for number in ready:
        for other in out[number]:
            ranks[other] = max(ranks[other], ranks[number] + 1)
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    if last:
        ranks[count - last :] = [max(ranks[: count - last], default=0) + 1] * last
    return ranks


def _bend(lines: list[tuple[int, int]], ranks: list[int]) -> tuple[list[list[int]], list[int]]:
    """A bend in each row between; the longest lines go without where there would be too many."""
    ranks, left = list(ranks), _MOST_BENDS
    chains = [[a, b] for a, b in lines]
    for i in sorted(range(len(lines)), key=lambda i: (ranks[lines[i][1]] - ranks[lines[i][0]], i)):
        a, b = lines[i]
        left -= max(ranks[b] - ranks[a] - 1, 0)
        if left < 0:
            break
        for rank in range(ranks[a] + 1, ranks[b]):
            chains[i].insert(-1, len(ranks))
            ranks.append(rank)
    return chains, ranks


class _Columns:
    """The order within rows, and then how far to the right each thing is.

    Attributes:
        rows: things and bends, row by row.
        xs: where the middle of each is.
    """

    def __init__(self, sizes: list[float], count: int, row_of: list[int], chains: list[list[int]]) -> None:
        self.rows: list[list[int]] = [[] for _ in range(max(row_of, default=-1) + 1)]
        self.xs = [0.0] * len(sizes)
        self._sizes = sizes
        self._above: list[list[int]] = [[] for _ in sizes]
        self._below: list[list[int]] = [[] for _ in sizes]
        for number, row in enumerate(row_of):
            self.rows[row].append(number)
        for chain in chains:
            for a, b in pairwise(chain):
                if row_of[b] == row_of[a] + 1:
                    self._above[b].append(a)
                    self._below[a].append(b)
        ends = (above and not below for above, below in zip(self._above, self._below, strict=True))
        self._kinds = [_BEND if i >= count else _END if is_end else _THING for i, is_end in enumerate(ends)]

    def sort(self) -> None:
        """Sort rows by those above, then by those below, again and again; the order with the fewest crossings stays."""
        best, fewest = [list(row) for row in self.rows], None
        for _ in range(_SWEEPS):
            for neighbours, rows in self._directions():
                for other, row in pairwise(rows):
                    self._sort_row(row, other, neighbours)
                crossings = sum(self._count_crossings(row, below) for row, below in pairwise(self.rows))
                if fewest is None or crossings < fewest:
                    best, fewest = [list(row) for row in self.rows], crossings
                if not crossings:
                    break
        self.rows = best

    def spread(self) -> None:
        """Pull things to their neighbours above, then below, until that moves none."""
        if all(len(row) == 1 for row in self.rows):
            return
        for row in self.rows:
            self._settle(row, [0.0] * len(row), [1.0] * len(row))
        for is_late in (False, True):
            for _ in range(_PULLS):
                before = list(self.xs)
                for neighbours, rows in self._directions():
                    for row in rows[1:]:
                        self._pull(row, neighbours, is_late=is_late)
                if self.xs == before:
                    break

    def _directions(self) -> tuple[tuple[list[list[int]], list[list[int]]], ...]:
        """Down and up: the neighbours that count, and the rows in that order."""
        return (self._above, self.rows), (self._below, self.rows[::-1])

    def _sort_row(self, row: list[int], other: list[int], neighbours: list[list[int]]) -> None:
        """Sort a row by the mean place of neighbours; things without any keep their place.

        Among things with the same neighbours, dead ends are rightmost, and bends come before them.
        """
        places = {number: place for place, number in enumerate(other)}
        own = {number: place for place, number in enumerate(row)}

        def center(number: int) -> tuple[float, int, int]:
            near = [places[each] for each in neighbours[number]]
            return (sum(near) / len(near) if near else own[number], self._kinds[number], own[number])

        row.sort(key=center)

    def _count_crossings(self, row: list[int], other: list[int]) -> int:
        places = {number: place for place, number in enumerate(other)}
        seen: list[int] = []
        crossings = 0
        for number in row:
            ends = sorted(places[each] for each in self._below[number])
            crossings += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
        return crossings

    def _pull(self, row: list[int], neighbours: list[list[int]], *, is_late: bool) -> None:
        wanted, weights = [], []
        for number in row:
            near = self._choose(self._kinds[number], neighbours[number], is_late)
            wanted.append(median(self.xs[other] for other in near) if near else self.xs[number])
            weights.append(_WEIGHTS[self._kinds[number]] if near else _NO_WEIGHT)
        self._settle(row, wanted, weights)

    def _choose(self, kind: int, near: list[int], is_late: bool) -> list[int]:
        """Choose the neighbours that matter most: a thing is pulled to their median.

        To a bend bends do, so that long lines are straight; late on, one without bends next to it stays where it is.
        """
        order = (_THING, _BEND, _END) if kind != _BEND else (_BEND,) if is_late else (_BEND, _THING, _END)
        found = ([other for other in near if self._kinds[other] == each] for each in order)
        return next(filter(None, found), [])

    def _settle(self, row: list[int], wanted: list[float], weights: list[float]) -> None:
        """Place things near their wanted places without overlaps: least squares, by pooling neighbours that collide."""
        offsets = [0.0]
        for a, b in pairwise(row):
            space = 4.0 if self._kinds[a] == self._kinds[b] == _BEND else SPACE
            offsets.append(offsets[-1] + (self._sizes[a] + self._sizes[b]) / 2 + space)
        pools: list[list[float]] = []  # weighted sum, weight, how many
        for x, offset, weight in zip(wanted, offsets, weights, strict=True):
            pools.append([(x - offset) * weight, weight, 1])
            while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
                last = pools.pop()
                pools[-1] = [a + b for a, b in zip(pools[-1], last, strict=True)]
        starts = (total / weight for total, weight, members in pools for _ in range(int(members)))
        for number, start, offset in zip(row, starts, offsets, strict=True):
            self.xs[number] = start + offset
