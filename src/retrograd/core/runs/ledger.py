"""Which contributions of which ranks are in a folder into which several ranks are merged, told with their rows.

A part file of statistics carries the ledger of all rows up to its own, so rows and what is told of them appear at once.
Whoever goes on with the folder of a process that was killed reads there what was written, and writes only the rest.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from retrograd.core.errors import RunError
from retrograd.core.foreign.text import check_kinds, parse_object
from retrograd.core.history.sink import Unit
from retrograd.core.runs.layout import STATISTICS, list_parts, list_rank_folders
from retrograd.core.runs.parts import PartFile, explain_damage

LEDGER = b"retrograd.ledger"
"""Key of the metadata of a part file."""
_REMEMBERED = 64
"""Steps of which it is known whose rows are in."""


class Ledger:
    """A set of units.

    Of each rank the first number that is missing is held, and, where there are gaps, those in after it: numbers come
    nearly in order. Of late steps it is known besides which ranks are in.

    Args:
        sessions: what tells the processes that merge from others that have written the same folder before.

    Attributes:
        forgotten: the last step of which it is known no more which ranks are in; −1 for none.
    """

    def __init__(self, sessions: Iterable[str] = ()) -> None:
        self.sessions = set(sessions)
        self.forgotten = -1
        self._next: dict[int, int] = {}
        self._beyond: dict[int, set[int]] = {}
        self._ranks: dict[tuple[int, int], set[int]] = {}

    def __contains__(self, unit: Unit) -> bool:
        return unit.number < self._next.get(unit.rank, 0) or unit.number in self._beyond.get(unit.rank, ())

    def add(self, units: Iterable[Unit]) -> None:
        """Put units in."""
        for unit in units:
            if unit.number == self._next.get(unit.rank, 0):
                self._next[unit.rank] = unit.number + 1
                self._close_gaps(unit.rank)
            elif unit not in self:
                self._beyond.setdefault(unit.rank, set()).add(unit.number)
            self._ranks.setdefault((unit.step, unit.turn), set()).add(unit.rank)
        self._forget()

    def update(self, other: Ledger) -> None:
        """Put in all of another one."""
        self.sessions |= other.sessions
        self.forgotten = max(self.forgotten, other.forgotten)
        for rank, first in other._next.items():
            self._next[rank] = max(self._next.get(rank, 0), first)
        for rank, numbers in other._beyond.items():
            self._beyond.setdefault(rank, set()).update(numbers)
        for rank in list(self._beyond):
            self._close_gaps(rank)
        for when, ranks in other._ranks.items():
            self._ranks.setdefault(when, set()).update(ranks)
        self._forget()

    def copy(self) -> Ledger:
        """One that changes no more with this one."""
        copied = Ledger()
        copied.update(self)
        return copied

    @property
    def late_steps(self) -> Iterator[tuple[int, int, Collection[int]]]:
        """The last steps and turns, each with the ranks that are in."""
        for (step, turn), ranks in self._ranks.items():
            yield step, turn, ranks

    def tell(self, ranks: Collection[int] | None = None) -> dict[str, Any]:
        """All of it as plain data; of some ranks their numbers alone."""
        mine = self._next.keys() | self._beyond.keys() if ranks is None else ranks
        numbers = {
            str(rank): [self._next.get(rank, 0), *sorted(self._beyond.get(rank, ()))]
            for rank in sorted(mine)
            if rank in self._next or rank in self._beyond
        }
        steps = [] if ranks is not None else [[*when, *_pack(found)] for when, found in self._ranks.items()]
        told = {"sessions": sorted(self.sessions), "numbers": numbers, "steps": steps}
        return told if self.forgotten < 0 or ranks is not None else {**told, "forgotten": self.forgotten}

    @classmethod
    def read(cls, told: Any) -> Ledger:
        """Read what :meth:`tell` has made.

        Raises:
            ValueError, TypeError: it is something else.
        """
        check_kinds({"told": told}, {"told": dict[str, Any]})
        kinds = {"sessions": list[str], "numbers": dict[str, list[int]], "steps": list[list[int]]}
        check_kinds({**dict.fromkeys(kinds), **told}, {**kinds, "forgotten": int})
        ledger = cls(told["sessions"])
        ledger.forgotten = told.get("forgotten", -1)
        for rank, (first, *beyond) in told["numbers"].items():
            ledger._next[int(rank)] = first
            if beyond:
                ledger._beyond[int(rank)] = set(beyond)
        for step, turn, *spans in told["steps"]:
            ledger._ranks[step, turn] = set(_unpack(spans))
        return ledger

    def _close_gaps(self, rank: int) -> None:
        beyond = self._beyond.pop(rank, None)
        if beyond is None:
            return
        first = self._next.get(rank, 0)
        while first in beyond:
            first += 1
        self._next[rank] = first
        if left := {number for number in beyond if number > first}:
            self._beyond[rank] = left

    def _forget(self) -> None:
        if len(self._ranks) > 2 * _REMEMBERED:
            for when in sorted(self._ranks)[:-_REMEMBERED]:
                del self._ranks[when]
                self.forgotten = max(self.forgotten, when[0])


def _pack(ranks: Collection[int]) -> list[int]:
    """Numbers as spans, the first and the last of each."""
    ordered = sorted(ranks)
    breaks = [place for place, (left, right) in enumerate(pairwise(ordered), 1) if right > left + 1]
    found: list[int] = []
    for first, last in zip([0, *breaks], [*breaks, len(ordered)], strict=True):
        found += [ordered[first], ordered[last - 1]]
    return found


def _unpack(spans: list[int]) -> Iterator[int]:
    for first, last in zip(spans[::2], spans[1::2], strict=True):
        if not 0 <= first <= last < 1 << 24:
            raise ValueError("there are no such ranks")
        yield from range(first, last + 1)


def write_ledger(ledger: Ledger) -> Mapping[bytes, bytes]:
    """The metadata of a part file that tells of its rows and of all before."""
    return {LEDGER: json.dumps(ledger.tell(), separators=(",", ":")).encode()}


def read_ledgers(run: Path, sessions: Collection[str]) -> Ledger:
    """What these sessions have written to a run, whichever rank wrote it."""
    found = Ledger(sessions)
    for folder in list_rank_folders(run):
        for _, path in reversed(list_parts(folder / STATISTICS)):
            ledger = _read_part(path)
            if ledger is not None:
                if not ledger.sessions.isdisjoint(sessions):
                    found.update(ledger)
                break
    return found


def _read_part(path: Path) -> Ledger | None:
    """The ledger of a part file; None where it has none, or is damaged: then its rows cannot be read either."""
    try:
        with explain_damage(path):
            told = (PartFile(path).metadata.metadata or {}).get(LEDGER)
            return None if told is None else Ledger.read(parse_object(told.decode()))
    except (FileNotFoundError, RunError):
        return None
