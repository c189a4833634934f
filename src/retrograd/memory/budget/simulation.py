"""Simulate a recorded pass under a plan: the bytes at each position, and the time. Nothing is run here.

Positions count events: a storage range is packed, asked for, or freed by autograd.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from retrograd.memory.policies.transfers import InFlight

Choice = Literal["keep", "offload"]
EventKind = Literal["pack", "ask", "free"]
Event = tuple[EventKind, int]
"""What happens, and the number of the range to which it does."""


@dataclass(frozen=True, slots=True)
class SavedRange:
    """A storage range that autograd held in a recorded pass.

    Attributes:
        nbytes: its size.
        path: the module that saved it.
        kind: dtype and shape of what was saved in it, in words.
        packed: position at which it was.
        left: first position at which the program itself does not hold it any more.
        asked: position at which a backward pass first asks for it; None: never.
        freed: position at which autograd lets go of it; the number of positions where it has not.
    """

    nbytes: int
    path: str
    kind: str
    packed: int
    left: int
    asked: int | None
    freed: int

    @property
    def can_leave(self) -> int:
        """First position at which its memory may be away."""
        return max(self.left, self.packed + 1)

    @property
    def needed(self) -> int:
        """Position up to which it may be away."""
        return self.freed if self.asked is None else self.asked

    def at_positions_of(self, other: SavedRange) -> SavedRange:
        """The same range in another pass, with what was found out about this one."""
        return replace(self, packed=other.packed, left=other.left, asked=other.asked, freed=other.freed)


@dataclass(frozen=True, slots=True)
class MeasuredPass:
    """A forward pass and what followed, until autograd held nothing of it.

    Attributes:
        ranges: in the order in which they were packed.
        events: what happened, in order.
        seconds: computing time between each event and the one before it.
        background: bytes held by earlier passes while it began.
    """

    ranges: tuple[SavedRange, ...]
    events: tuple[Event, ...]
    seconds: tuple[float, ...]
    background: int = 0


@dataclass(frozen=True, slots=True)
class Link:
    """The speed with which memory leaves and comes back, each direction by itself.

    Attributes:
        out: bytes a second away from the device.
        back: bytes a second to the device.
        latency: seconds that the program spends on each range.
        work_out: seconds for each byte that leaves that its copying takes from the program: on a CPU, other threads
            do it, for which the program has one core less.
        work_back: the same for each byte that comes back.
    """

    out: float
    back: float
    latency: float = 0.0
    work_out: float = 0.0
    work_back: float = 0.0

    def price(self, nbytes: int) -> float:
        """Seconds for a range that leaves and comes back, if nothing ran beside it."""
        return 2 * self.latency + nbytes * (1 / self.out + 1 / self.back + self.work_out + self.work_back)


@dataclass(frozen=True, slots=True)
class Decisions:
    """A plan, as far as a simulation needs it.

    Attributes:
        choices: one for each range.
        window: bytes that may be in flight. The last range that left stays until the next one follows.
        fetches: range → position of the first request after which it is brought back; without an entry it is
            brought back when it is asked for.
    """

    choices: Sequence[Choice]
    window: int
    fetches: Mapping[int, int] = field(default_factory=dict)


def find_departures(recording: MeasuredPass, decisions: Decisions) -> dict[int, int]:
    """Find out when ranges that are taken elsewhere are gone.

    Returns:
        Range → position before which its memory is still there, for those that are really gone before they are
        needed. What is among the last bytes of the window turns round without having left.
    """
    gone: dict[int, int] = {}
    leaving: InFlight[int] = InFlight()
    ranges = recording.ranges
    for number, choice in enumerate(decisions.choices):
        saved_range = ranges[number]
        if choice != "offload":
            continue
        for first in leaving.add(number, saved_range.nbytes, decisions.window):
            position = max(ranges[first].left, saved_range.packed + 1)
            if position < ranges[first].needed:
                gone[first] = position
    return gone


def count_residency(
    recording: MeasuredPass, decisions: Decisions, departures: Mapping[int, int]
) -> npt.NDArray[np.int64]:
    """Count the bytes in memory at each position, with those of earlier passes."""
    positions = len(recording.events)
    change = np.zeros(positions + 1, dtype=np.int64)
    for number, saved_range in enumerate(recording.ranges):
        nbytes, needed = saved_range.nbytes, saved_range.needed
        change[saved_range.packed] += nbytes
        change[saved_range.freed] -= nbytes
        away, back = departures.get(number, needed), decisions.fetches.get(number, needed)
        if away < back < positions:  # else it never comes back
            change[away] -= nbytes
            change[back] += nbytes
    held: npt.NDArray[np.int64] = np.cumsum(change[:-1]) + recording.background
    return held


def predict_seconds(recording: MeasuredPass, decisions: Decisions, departures: Mapping[int, int], link: Link) -> float:
    """Predict how long the pass takes. Copies cost nothing as long as something is computed beside them."""
    clock = _PassClock(recording.ranges, decisions, departures, link)
    for position, (kind, number) in enumerate(recording.events):
        clock.now += recording.seconds[position]
        if kind == "pack":
            clock.pack(number)
        elif kind == "ask" and position == recording.ranges[number].asked:
            clock.fetch(position)
            clock.bring(number)
    return clock.now


class _PassClock:
    """Time while a pass is gone through; each direction of the link is busy by itself."""

    def __init__(
        self, ranges: Sequence[SavedRange], decisions: Decisions, departures: Mapping[int, int], link: Link
    ) -> None:
        self.now = 0.0
        self._ranges = ranges
        self._decisions = decisions
        self._departures = departures
        self._link = link
        self._out_free = 0.0
        self._back_free = 0.0
        self._written: dict[int, float] = {}
        self._arrived: dict[int, float] = {}
        self._arriving: deque[int] = deque()
        self._leaving: InFlight[int] = InFlight()
        self._wanted_at: dict[int, list[int]] = {}
        for number, position in decisions.fetches.items():
            self._wanted_at.setdefault(position, []).append(number)

    def pack(self, number: int) -> None:
        """A range is packed; what is beyond the window is waited for."""
        saved_range, choice = self._ranges[number], self._decisions.choices[number]
        if choice != "offload":
            return
        self.now += self._link.latency + saved_range.nbytes * self._link.work_out
        self._out_free = max(self.now, self._out_free) + saved_range.nbytes / self._link.out
        self._written[number] = self._out_free
        for first in self._leaving.add(number, saved_range.nbytes, self._decisions.window):
            self.now = max(self.now, self._written[first])

    def fetch(self, position: int) -> None:
        """Let other ranges begin to come back."""
        for wanted in self._wanted_at.get(position, ()):
            self._fetch(wanted)

    def bring(self, number: int) -> None:
        """A range has to be there."""
        if number in self._departures:
            if number not in self._arrived:
                self._fetch_at_once(number)
            self.now = max(self.now, self._arrived[number])
            self.now += self._link.latency + self._ranges[number].nbytes * self._link.work_back

    def _fetch(self, number: int) -> None:
        start = max(self.now, self._back_free, self._written[number])
        self._back_free = start + self._ranges[number].nbytes / self._link.back
        self._arrived[number] = self._back_free
        self._arriving.append(number)

    def _fetch_at_once(self, number: int) -> None:
        """Before what was fetched ahead and has not come yet, which comes so much later."""
        start, seconds = max(self.now, self._written[number]), self._ranges[number].nbytes / self._link.back
        self._arrived[number] = start + seconds
        while self._arriving and self._arrived[self._arriving[0]] <= start:
            self._arriving.popleft()
        for ahead in self._arriving:
            self._arrived[ahead] += seconds
        self._back_free = max(self._back_free, start) + seconds
