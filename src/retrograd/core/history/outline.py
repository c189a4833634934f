"""What is known of rows without their numbers: which steps and sites they are of, and in which order sites ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from retrograd.core.history.rows import Part
from retrograd.core.history.steps import number_steps

IntArray = npt.NDArray[np.int64]

NO_ORDER = int(np.iinfo(np.int64).max)
"""The order of a site of which it is not known, or that has no rows."""

_MOST_WAITING = 1 << 19
"""Steps that are held besides those that are united already."""


@dataclass(frozen=True, slots=True)
class RecordOutline:
    """What is known of a record without its numbers.

    Attributes:
        steps: for each phase, by its code, the steps that have rows, rising.
        orders: for each site, by its code, the lowest number of its order; the largest integer where it is not known.
    """

    steps: dict[int, IntArray]
    orders: IntArray

    @property
    def all_steps(self) -> IntArray:
        """Steps that have rows of any phase, rising."""
        return unite(list(self.steps.values()))


class Outliner:
    """Adds up an outline, piece by piece.

    Attributes:
        orders: as of a :class:`RecordOutline`, so far.
    """

    def __init__(self, sites: int = 0) -> None:
        self.orders = np.full(sites, NO_ORDER)
        self._steps: dict[int, list[IntArray]] = {}
        self._runs: dict[int, list[IntArray]] = {}

    def add(self, piece: Part) -> None:
        """Take in rows with their columns ``step``, ``phase``, ``site`` and ``order``."""
        self.add_orders(piece["site"], np.where(piece["order"] < 0, NO_ORDER, piece["order"]))
        phase = piece["phase"]
        for code in np.unique(phase).tolist():
            self.add_steps(int(code), list_steps(piece["step"][phase == code]))

    def add_orders(self, sites: npt.NDArray[np.integer], orders: IntArray) -> None:
        """Take in orders, each of a site."""
        need = int(sites.max(initial=-1)) + 1 - len(self.orders)
        if need > 0:
            self.orders = np.concatenate((self.orders, np.full(need, NO_ORDER)))
        np.minimum.at(self.orders, sites, orders)

    def add_steps(self, phase: int, steps: IntArray) -> None:
        """Take in steps of a phase, rising."""
        listed = self._steps.setdefault(phase, [])
        listed.append(steps)
        if len(listed) > 1 and sum(map(len, listed[1:])) > len(listed[0]) + _MOST_WAITING:
            listed[:] = [unite(listed)]

    def add_runs(self, phase: int, runs: IntArray) -> None:
        """Take in steps of a phase as :func:`to_runs` gives them."""
        self._runs.setdefault(phase, []).append(runs)

    def finish(self) -> RecordOutline:
        """The outline of all that was taken in."""
        for phase, several in self._runs.items():
            self.add_steps(phase, from_runs(join_runs(several)))
        self._runs.clear()
        return RecordOutline({phase: unite(listed) for phase, listed in self._steps.items()}, self.orders)


def list_steps(steps: npt.NDArray[np.integer]) -> IntArray:
    """The different ones, rising; rows mostly come in their order, and then need no sorting."""
    rising: IntArray = steps[np.flatnonzero(np.diff(steps, prepend=steps[:1] - 1))].astype(np.int64)
    return number_steps(rising)[0]


def unite(listed: Sequence[IntArray]) -> IntArray:
    """All numbers of some rising lists, each once and rising."""
    return listed[0] if len(listed) == 1 else number_steps(np.concatenate([np.empty(0, np.int64), *listed]))[0]


# ---- steps with even gaps take three numbers ----


def to_runs(steps: IntArray) -> IntArray:
    """Rising numbers as runs of even gaps: first, last and gap of each, shape ``[n, 3]``."""
    if not len(steps):
        return np.empty((0, 3), np.int64)
    gaps = np.diff(steps)
    ends = np.append(np.flatnonzero(np.diff(gaps)) + 1, len(steps) - 1)  # a run ends where the gap changes
    runs, start = [], 0
    for end in ends.tolist():
        if start > end:
            continue
        gap = int(steps[start + 1] - steps[start]) if end > start else 1
        runs.append((int(steps[start]), int(steps[end]), gap))
        start = end + 1
    return np.array(runs, np.int64).reshape(-1, 3)


def join_runs(several: Sequence[IntArray]) -> IntArray:
    """Runs that stand for the numbers of all: as of a part each, of which one goes on where another ends."""
    runs = np.unique(np.concatenate(several), axis=0)  # ranks mostly have the same
    (low, high, gap), (_, end, gap_before) = runs[1:].T, runs[:-1].T
    goes_on = (gap == gap_before) & ((low - end) % gap == 0) & (low <= end + gap) & (high >= end)
    starts = np.flatnonzero(np.concatenate(([True], ~goes_on)))[: len(runs)]
    ends = np.append(starts[1:], len(runs)) - 1
    return np.stack([runs[starts, 0], runs[ends, 1], runs[starts, 2]], axis=1)


def from_runs(runs: IntArray) -> IntArray:
    """The numbers of :func:`to_runs`, each once and rising, though runs may overlap."""
    return unite([np.arange(low, high + 1, gap) for low, high, gap in runs.tolist()])


def count_runs(runs: IntArray) -> int:
    """How many numbers they stand for."""
    return int(((runs[:, 1] - runs[:, 0]) // runs[:, 2] + 1).sum())
