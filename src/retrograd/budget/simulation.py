"""What a plan would hold at each position of a recorded pass. Nothing is run here.

Positions count events: a stretch of memory is packed, asked for, or freed by autograd.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from retrograd.policies.in_flight import UnderWay

Choice = Literal["keep", "offload", "lossless", "rerun"]
EventKind = Literal["pack", "ask", "free"]
Event = tuple[EventKind, int]
"""What happens, and the number of the stretch to which it does."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of memory that autograd held in a recorded pass.

    Attributes:
        nbytes: its size.
        path: the module that saved it.
        kind: dtype and shape of what was saved in it, in words.
        packed: position at which it was.
        left: first position at which the program itself does not hold it any more.
        asked: position at which a backward pass first asks for it; None: never.
        freed: position at which autograd lets go of it; the number of positions where it has not.
        small_bytes: what a lossless copy takes; None where there is none.
        squeeze_seconds: how long it takes to make one.
        expand_seconds: how long it takes to read one.
        rerun: the operations that make it again, in words; empty where none do.
        sources: stretches, packed before it, that these are given.
        rerun_seconds: how long they take.
        rerun_bytes: memory that they need besides.
        rerun_numbers: which operations of the pass they are.
    """

    nbytes: int
    path: str
    kind: str
    packed: int
    left: int
    asked: int | None
    freed: int
    small_bytes: int | None = None
    squeeze_seconds: float = 0.0
    expand_seconds: float = 0.0
    rerun: str = ""
    sources: tuple[int, ...] = ()
    rerun_seconds: float = 0.0
    rerun_bytes: int = 0
    rerun_numbers: tuple[int, ...] = ()

    @property
    def needed(self) -> int:
        """Position up to which it may be away."""
        return self.freed if self.asked is None else self.asked


@dataclass(frozen=True, slots=True)
class Recording:
    """A forward pass and what followed, until autograd held nothing of it.

    Attributes:
        stretches: in the order in which they were packed.
        events: what happened, in order.
        seconds: computing time between each event and the one before it.
        background: bytes held by earlier passes while it began.
    """

    stretches: tuple[Stretch, ...]
    events: tuple[Event, ...]
    seconds: tuple[float, ...]
    background: int = 0


@dataclass(frozen=True, slots=True)
class Link:
    """How fast memory leaves and comes back, each direction by itself.

    Attributes:
        out: bytes a second away from the device.
        back: bytes a second to the device.
        latency: seconds that the program spends on each stretch.
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
        """Seconds for a stretch that leaves and comes back, if nothing ran beside it."""
        return 2 * self.latency + nbytes * (1 / self.out + 1 / self.back + self.work_out + self.work_back)


@dataclass(frozen=True, slots=True)
class Decisions:
    """A plan, as far as a simulation needs it.

    Attributes:
        choices: one for each stretch.
        window: bytes that may be on their way out. The last stretch that left stays until the next one follows.
        fetches: stretch → position of the first request after which it is brought back; without an entry it is
            brought back when it is asked for.
    """

    choices: Sequence[Choice]
    window: int
    fetches: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Spans:
    """When stretches have to be there.

    Attributes:
        needed: position up to which each may be away: it is asked for, or another is made of it.
        freed: position at which it goes: autograd lets go of it, and of all that are made of it.
    """

    needed: Sequence[int]
    freed: Sequence[int]


def find_spans(recording: Recording, choices: Sequence[Choice]) -> Spans:
    """What is made again needs what it is made of."""
    needed = [stretch.needed for stretch in recording.stretches]
    freed = [stretch.freed for stretch in recording.stretches]
    for number in reversed(range(len(choices))):
        if choices[number] == "rerun":
            for source in recording.stretches[number].sources:
                needed[source] = min(needed[source], needed[number])
                freed[source] = max(freed[source], freed[number])
    return Spans(needed, freed)


def find_departures(recording: Recording, decisions: Decisions) -> dict[int, int]:
    """When stretches that are taken elsewhere are gone.

    Returns:
        Stretch → position before which its memory is still there, for those that are really gone before they are
        needed. What is among the last bytes of the window turns round without having left.
    """
    gone: dict[int, int] = {}
    leaving: UnderWay[int] = UnderWay()
    stretches, spans = recording.stretches, find_spans(recording, decisions.choices)
    for number, choice in enumerate(decisions.choices):
        stretch = stretches[number]
        if choice != "offload":
            continue
        for first in leaving.add(number, stretch.nbytes, decisions.window):
            position = max(stretches[first].left, stretch.packed + 1)
            if position < spans.needed[first]:
                gone[first] = position
    return gone


def count_residency(recording: Recording, decisions: Decisions, departures: Mapping[int, int]) -> npt.NDArray[np.int64]:
    """Bytes in memory at each position, with those of earlier passes."""
    spans = find_spans(recording, decisions.choices)
    positions = len(recording.events)
    change = np.zeros(positions + 1, dtype=np.int64)
    beside = np.zeros(positions, dtype=np.int64)
    for number, stretch in enumerate(recording.stretches):
        nbytes, choice = stretch.nbytes, decisions.choices[number]
        needed, freed = spans.needed[number], spans.freed[number]
        change[stretch.packed] += nbytes
        change[freed] -= nbytes
        away = max(stretch.left, stretch.packed + 1)
        if choice == "lossless" and stretch.small_bytes is not None:
            change[stretch.packed] += stretch.small_bytes
            change[freed] -= stretch.small_bytes
        elif choice == "rerun":
            if away < needed < positions:
                beside[needed] = max(beside[needed], stretch.rerun_bytes)
        else:
            away = departures.get(number, needed)
        back = decisions.fetches.get(number, needed)
        if away < back < positions:  # else it never comes back
            change[away] -= nbytes
            change[back] += nbytes
    held: npt.NDArray[np.int64] = np.cumsum(change[:-1]) + beside + recording.background
    return held
