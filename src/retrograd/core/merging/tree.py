"""The tree along which ranks hand over their rows: each to the first of its sixteen, those to the first of theirs.

Ranks that lie side by side have a near ancestor in common; so what neighbours hold copies of, as those of one machine
under tensor parallelism do, is told apart early.
"""

from __future__ import annotations

FAN_IN = 16


def find_ancestors(rank: int) -> list[int]:
    """The ranks that a rank's rows pass through, the nearest first; empty for rank 0."""
    found = []
    size = 1
    while rank:
        size *= FAN_IN
        above = rank - rank % size
        if above != rank:
            found.append(above)
            rank = above
    return found


def find_span(rank: int, processes: int) -> range:
    """A rank and all below it."""
    size = 1
    while size < processes and rank % (size * FAN_IN) == 0:
        size *= FAN_IN
    return range(rank, min(rank + size, processes))


def find_children(rank: int, processes: int) -> list[int]:
    """The ranks that hand their rows to this one."""
    size = len(find_span(rank, processes))
    steps = [FAN_IN**power for power in range(8) if FAN_IN**power < size]
    return [rank + step * number for step in steps for number in range(1, FAN_IN) if rank + step * number < processes]
