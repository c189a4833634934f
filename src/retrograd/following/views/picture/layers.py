"""A layered layout without coordinates: which row each thing is in, and the order within rows.

Sugiyama's method: lines that close a circle are turned round, rows by the longest path, long lines get a bend in every
row that they pass, and rows are sorted by the barycentre of their neighbours until there are no fewer crossings.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

_SWEEPS = 8
_MOST_BENDS = 4000


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Rows of things, from top to bottom.

    Attributes:
        rows: numbers of the things in each row, from left to right. Numbers from the count of things on are bends.
        chains: for each line what it passes, from top to bottom, both ends included.
        turned: for each line whether it runs upwards.
    """

    rows: list[list[int]]
    chains: list[list[int]]
    turned: list[bool]


def arrange(count: int, lines: list[tuple[int, int]], *, first: int = 0, last: int = 0) -> Arrangement:
    """Lay out things and the lines between them.

    Args:
        count: how many things there are. Their numbers are in the order in which they would be drawn best.
        lines: pairs of numbers: from, to.
        first: how many of them (those with the smallest numbers) stand in a row of their own at the top.
        last: how many of them (those with the largest numbers) stand in a row of their own at the bottom.
    """
    turned = _break_circles(count, lines)
    down = [(b, a) if back else (a, b) for (a, b), back in zip(lines, turned, strict=True)]
    ranks = _rank(count, down, first, last)
    chains, ranks = _bend(down, ranks)
    rows: list[list[int]] = [[] for _ in range(max(ranks, default=-1) + 1)]
    for number, rank in enumerate(ranks):
        rows[rank].append(number)
    return Arrangement(_sort_rows(rows, chains, count), chains, turned)


def _break_circles(count: int, lines: list[tuple[int, int]]) -> list[bool]:
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


def _rank(count: int, lines: list[tuple[int, int]], first: int, last: int) -> list[int]:
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


def _sort_rows(rows: list[list[int]], chains: list[list[int]], count: int) -> list[list[int]]:
    above, below = defaultdict(list), defaultdict(list)
    row_of = [0] * sum(map(len, rows))
    for r, row in enumerate(rows):
        for number in row:
            row_of[number] = r
    for chain in chains:
        for a, b in pairwise(chain):
            if row_of[b] == row_of[a] + 1:
                above[b].append(a)
                below[a].append(b)
    shy = [1 if number >= count else 0 if below[number] or not above[number] else 2 for number in range(len(row_of))]
    best, fewest = [list(row) for row in rows], None
    for sweep in range(_SWEEPS):
        downwards = sweep % 2 == 0
        sides = range(1, len(rows)) if downwards else range(len(rows) - 2, -1, -1)
        for r in sides:
            other = rows[r - 1] if downwards else rows[r + 1]
            _sort_row(rows[r], other, above if downwards else below, shy)
        crossings = sum(_count_crossings(rows[r], rows[r + 1], below) for r in range(len(rows) - 1))
        if fewest is None or crossings < fewest:
            best, fewest = [list(row) for row in rows], crossings
        if not crossings:
            break
    return best


def _sort_row(row: list[int], other: list[int], neighbours: dict[int, list[int]], shy: list[int]) -> None:
    """Sort a row by the mean place of neighbours; things without any keep their place.

    Among things with the same neighbours, dead ends are rightmost, and bends come before them.
    """
    places = {number: place for place, number in enumerate(other)}
    own = {number: place for place, number in enumerate(row)}

    def center(number: int) -> tuple[float, int, int]:
        near = [places[each] for each in neighbours[number]]
        return (sum(near) / len(near) if near else own[number], shy[number], own[number])

    row.sort(key=center)


def _count_crossings(row: list[int], other: list[int], below: dict[int, list[int]]) -> int:
    places = {number: place for place, number in enumerate(other)}
    seen: list[int] = []
    crossings = 0
    for number in row:
        ends = sorted(places[each] for each in below[number])
        crossings += sum(len(seen) - bisect_right(seen, end) for end in ends)
        for end in ends:
            insort(seen, end)
    return crossings
