"""A budget for overhead: which steps are recorded, so that recording takes a given share of a step's own time.

What a step costs is measured while it is made, and nothing is waited for: what is known of a step later is used later.
A recorded step is held against the median of the last unrecorded ones, so that one that is much longer than the others
(a first step, a checkpoint, a collection of garbage) counts for nothing, and a net that grows slower is followed. What
our part of an unrecorded step takes is paid for first, where it is known: on the CPU, by a clock of its own.

Of each 2, 4, 8 … steps one is recorded (counted in strides, where somebody numbers them 0, 10, 20 …): not always the
first, or of two nets that are trained in turns one would never be seen. Which one it is follows from the steps' numbers
alone, and each is also one of the smaller gaps': two runs with different gaps have the steps of the larger in common.

Ranks record the same steps, for their rows are merged. One of them measures and says what all do, on a board that they
read at every 32nd step; what it says holds from a later one of these on, when all have read it: they cannot be two
steps apart that exchange gradients at each.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch

from retrograd.core.history.facts import Gap
from retrograd.core.history.scalar_names import GRAD_NORM, LR
from retrograd.core.history.sink import Event, Moment
from retrograd.core.ranks.board import Board, find_board
from retrograd.core.ranks.processes import is_one_of_several
from retrograd.core.recording.schedule import FULL_STEPS, Overhead
from retrograd.core.spent import OwnTime, own_time, seconds_spent

WINDOW = 16
"""Steps that are recorded in full from a trigger on."""

_MOST = 1024
"""The largest gap."""

_PACE = 32
"""Ranks read what one of them has said at the steps that this divides."""

_SEEN = 4
"""Steps of each kind that are measured before a gap is chosen."""

_LEAST = 0.25
"""Share of the budget that recorded steps have in any case, however much is taken by what stays between them."""

_FINER = 0.8
"""Share of the budget that a smaller gap has to stay within; else a cost at the budget's edge moved it to and fro."""

_NOTHING, _STATISTICS, _ALL = range(3)
"""What is recorded of a step besides numbers of which it has one; all: updates of weights, too."""


class Lap(NamedTuple):
    """The time between two steps' beginnings.

    Attributes:
        seconds: all of it.
        ours: those of them that we have spent; NaN if that is not known.
    """

    seconds: float
    ours: float = math.nan


class Laps(Protocol):
    """A stopwatch."""

    def lap(self) -> Iterable[Lap]:
        """End a lap and begin the next; returns those that have become known, in order."""

    def stop(self) -> None:
        """No lap follows."""


class ThreadLaps:
    """CPU time of the training thread; of two laps in fifteen our own, too.

    Args:
        clock: seconds.
        own: those that are ours.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time, own: OwnTime = own_time) -> None:
        self._clock, self._own_time = clock, own
        self._number = 0
        self._began = self._own = math.nan

    def lap(self) -> Iterable[Lap]:
        began, own = self._began, self._own
        self._began, self._own = self._clock(), self._own_time.read()
        self._own_time.want(self._number % 15 < 3)  # not even, so that it meets each kind of step
        self._number += 1
        return () if self._number == 1 else (Lap(self._began - began, self._own - own),)

    def stop(self) -> None:
        self._own_time.want(False)


class DeviceLaps:
    """Time between events on the device, which holds what the device waits for this thread, too."""

    def __init__(self, make_event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True)) -> None:
        self._make = make_event
        self._events: deque[Any] = deque()

    def lap(self) -> Iterable[Lap]:
        self._events.append(self._make())
        self._events[-1].record()
        while len(self._events) > 1 and self._events[1].query():
            began = self._events.popleft()
            yield Lap(began.elapsed_time(self._events[0]) / 1e3)

    def stop(self) -> None:
        self._events.clear()


def make_laps() -> Laps:
    """A stopwatch for what the program computes on."""
    return DeviceLaps() if torch.cuda.is_initialized() else ThreadLaps()


class Agreed(NamedTuple):
    """What is recorded from a step on.

    Attributes:
        step: that step.
        gap, of_updates: which steps, and at which of them updates.
        until: all steps before this one; −1 for none of them.
        reason: as :class:`Gap` has it.
        share: what it is expected to cost.
    """

    step: int
    gap: int
    of_updates: int
    until: int
    reason: str
    share: float


class Range:
    """The last numbers of a series, and whether the next lies far beyond them."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=2 * WINDOW)

    def is_left_by(self, value: float, least: float) -> bool:
        """Return whether a number is above all by more than they lie apart, or by ``least``; then take it in."""
        seen = self._seen
        high = max(seen, default=math.inf)
        is_beyond = len(seen) == seen.maxlen and value > high + max(high - min(seen), least)
        seen.append(value)
        return is_beyond


class Triggers:
    """Finds in the events of a run what is to be recorded in full."""

    def __init__(self) -> None:
        self._losses: dict[int, Range] = {}
        self._norms = Range(), Range()
        self._rates: dict[str, float] = {}
        self._step, self._passes = -1, 0

    def find(self, event: Event) -> str:
        """The reason for a window, as :class:`Gap` has it; empty for none."""
        if event.kind == "loss":
            return self._see_loss(event)
        if event.kind in ("optimizer", "load"):
            return "phase"
        if event.kind == "scalar" and event.name == GRAD_NORM:
            return self._see_norm(event.value)
        if event.kind == "scalar" and event.name == LR:
            before, self._rates[event.text] = self._rates.get(event.text, event.value), event.value
            is_jump = before != event.value and max(before, event.value) >= 2 * min(before, event.value)
            return "phase" if is_jump else ""
        return ""

    def _see_loss(self, event: Event) -> str:
        self._passes = self._passes + 1 if event.moment.step == self._step else 0
        self._step = event.moment.step
        if not math.isfinite(event.value):
            return "nonfinite"
        series = self._losses.setdefault(min(self._passes, WINDOW), Range())
        return "loss" if series.is_left_by(event.value, abs(event.value) / 10) else ""

    def _see_norm(self, norm: float) -> str:
        if not math.isfinite(norm):
            return "nonfinite"
        size = math.log(max(norm, 1e-30))
        is_beyond = [each.is_left_by(number, 1.0) for each, number in zip(self._norms, (size, -size), strict=True)]
        return "gradient" if any(is_beyond) else ""


def is_chosen(number: int, gap: int) -> bool:
    """Return whether a step is the one that is recorded of those with its ``number // gap``.

    Of two blocks that make one of twice the size a hash of the larger's number says which hands its step on.

    Args:
        number: of the step, from 0.
        gap: a power of two.
    """
    size = 1
    while size < gap:
        block = number // size
        mixed = (block // 2 * 0x9E3779B1 + size * 0x85EBCA6B) & 0xFFFFFFFF
        mixed = (mixed ^ mixed >> 15) * 0x2C1B3C6D & 0xFFFFFFFF
        if block & 1 != mixed >> 31:
            return False
        size *= 2
    return True


_numbers = itertools.count()


class Budget:
    """Chooses the steps that are recorded.

    Args:
        wanted: the schedule.
        note: takes a :class:`Gap` whenever it changes.
        make_laps: makes the stopwatch, once every step has been recorded for long enough.
        now: seconds, by which that is known.
        beside: CPU seconds that writing has taken so far, in a thread of its own, which are paid for, too.
        find_board: finds the board of the ranks, by a name that all of them come to in the same order; None where there
            is none.

    Attributes:
        with_updates: of the step that has begun updates are recorded, too.
    """

    def __init__(
        self,
        wanted: Overhead,
        note: Callable[[Gap], None],
        make_laps: Callable[[], Laps] = make_laps,
        now: Callable[[], float] = time.monotonic,
        beside: Callable[[], float] = seconds_spent,
        find_board: Callable[[str], Board | None] = find_board,
    ) -> None:
        self._share, self._full_seconds = wanted.share, wanted.full_seconds
        self._note, self._make_laps, self._now = note, make_laps, now
        self._triggers = Triggers()
        self._laps: Laps | None = None
        self._beside, self._beside_before = beside, beside()
        self._board: Board | None = None
        self._find_board, self._name = find_board, f"retrograd/budget/{next(_numbers)}"
        self._planned = deque[Agreed]()
        """What ranks have agreed on and have not come to yet."""
        self._open = -1
        """The step at which the last plan of this rank begins."""
        self._written = 0.0
        """Seconds of writing for each recorded step."""
        self._kinds: deque[int] = deque()
        """Of laps that are not known yet."""
        self._bare: deque[float] = deque(maxlen=2 * _SEEN + 1)
        self._ours: deque[float] = deque(maxlen=2 * _SEEN + 1)
        """What is ours of unrecorded steps, as a share of what is not."""
        self._between = 0.0
        """The median of that."""
        self._extra = {kind: deque[float](maxlen=4 * _SEEN) for kind in (_STATISTICS, _ALL)}
        self._gap = self._of_updates = 1
        self._share_of_gap = math.nan
        self._is_begun = False
        self._counts = Counter[int]()
        self._kind = _NOTHING
        self._step = -1
        self._stride = 0
        self._is_on = True
        self._began: float | None = None
        self._until = -1
        self._granted: set[tuple[str, int]] = set()
        """For which reasons there has been a window, and at what power of ten of the number."""
        self._credit = self._cost = 0.0
        self._measured = 0
        self.with_updates = True

    @property
    def has_begun(self) -> bool:
        """True once a step has begun."""
        return bool(self._counts)

    def begin_step(self, step: int) -> bool:
        """Begin a step; returns whether it is recorded."""
        if step != self._step:
            if not self._is_begun and self._counts:
                self._stride = math.gcd(self._stride, step - self._step)
            self._step = step
            if self._laps is not None:
                self._measure(self._laps)
            kind = self._kind = self._choose(step)
            self._counts[kind] += 1
            if self._laps is not None:
                self._kinds.append(kind)
            self._is_on, self.with_updates = kind != _NOTHING, kind == _ALL
        return self._is_on

    def may_want(self, step: int) -> bool:
        """Return whether a step that has not begun is recorded, unless something else comes to light before."""
        return not self._is_begun or bool(self._planned) or step < self._until or self._find_kind(step) != _NOTHING

    def hear(self, event: Event) -> None:
        """An event was noted: begin a window, if it is one that a window can be paid for."""
        reason = self._triggers.find(event)
        if not reason or not self._is_chosen or self._step < self._until:
            return
        price = WINDOW * (self._find_extra(_ALL) - self._left)
        decade = math.floor(math.log10(abs(event.value))) if reason in ("loss", "gradient") and event.value else 0
        kind = reason, decade
        if kind not in self._granted or self._credit >= price:  # the first of each is recorded in any case
            self._granted.add(kind)
            stride = max(self._stride, 1)
            begin = self._find_begin(max(self._step, event.moment.step) + stride)
            until = begin + WINDOW * stride
            self._plan(Agreed(begin, self._gap, self._of_updates, until, reason, self._expect(1, 1)))

    def describe(self) -> dict[str, Any]:
        """What has come of it, for the manifest: shares are of a step's own time."""
        counts = self._counts
        return {
            "share": self._share,
            "measured": self._cost / self._measured + self._between if self._measured else None,
            "between": self._between if self._ours else None,
            "steps": counts.total(),
            "recorded": self._recorded,
            "updates": counts[_ALL],
        }

    def end(self, *, was_made: bool = True) -> None:
        """No step follows; without ``was_made`` the last one, say an evaluation's, has had no pass and no update."""
        if self._laps is not None:
            self._laps.stop()
        if not was_made and self._counts:
            self._counts[self._kind] -= 1

    # ---- choosing ----

    @property
    def _left(self) -> float:
        """The share that is left for recorded steps."""
        return max(self._share - self._between, _LEAST * self._share)

    @property
    def _recorded(self) -> int:
        return self._counts[_STATISTICS] + self._counts[_ALL]

    @property
    def _is_chosen(self) -> bool:
        return all(len(each) >= _SEEN for each in self._extra.values())

    def _choose(self, step: int) -> int:
        self._began = self._now() if self._began is None else self._began
        number = step // max(self._stride, 1)
        if number % _PACE == 0:
            self._meet_others()
        while self._planned and self._planned[0].step <= step:
            self._take(self._planned.popleft())
        if self._laps is None and not self._is_follower:
            is_full = self._counts.total() < FULL_STEPS or self._now() - self._began < self._full_seconds
            if is_full or (self._board is None and is_one_of_several()):  # each would have a gap of its own
                return _ALL
            self._laps = self._make_laps()
            list(self._laps.lap())
            self._plan(Agreed(self._find_begin(step), 2, 4, -1, "measure", math.nan))
        if step < self._until or not self._is_begun:
            return _ALL
        if self._until >= 0:
            self._until = -1
            self._tell(self._gap, self._of_updates, "cost", self._share_of_gap)
        return self._find_kind(step)

    @property
    def _is_follower(self) -> bool:
        return self._board is not None and not self._board.is_led

    def _meet_others(self) -> None:
        if self._board is None:
            self._board = self._find_board(self._name)
        if self._board is not None:
            self._planned.extend(Agreed(*json.loads(text)) for text in self._board.read())

    def _find_begin(self, step: int) -> int:
        """The first step from this one on at which a plan of now can begin."""
        if self._board is None:
            return step
        pace = _PACE * max(self._stride, 1)
        return max((step // pace + 2) * pace, self._open + pace)

    def _plan(self, plan: Agreed) -> None:
        if self._board is None:
            self._take(plan)
        elif self._board.is_led:
            self._open = plan.step
            self._board.post(json.dumps(plan))

    def _take(self, plan: Agreed) -> None:
        self._is_begun = True
        if plan.until >= 0:
            self._until = plan.until
            self._tell(1, 1, plan.reason, plan.share, plan.step)
            return
        self._gap, self._of_updates, self._share_of_gap = plan.gap, plan.of_updates, plan.share
        if self._step >= self._until:
            self._tell(plan.gap, plan.of_updates, plan.reason, plan.share)

    def _find_kind(self, step: int) -> int:
        number = step // max(self._stride, 1)
        gap = 2 if self._gap == 1 and 0 < number % _MOST < WINDOW else self._gap  # else what is bare would be forgotten
        if not is_chosen(number, gap):
            return _NOTHING
        return _ALL if is_chosen(number, self._of_updates) else _STATISTICS

    def _tell(self, gap: int, of_updates: int, reason: str, share: float, step: int = -1) -> None:
        moment = Moment(self._step if step < 0 else step)
        self._note(Gap(value=gap, updates=of_updates, reason=reason, share=share, moment=moment))

    # ---- measuring ----

    def _measure(self, laps: Laps) -> None:
        self._written = (self._beside() - self._beside_before) / max(self._recorded, 1)
        for seconds, ours in laps.lap():
            kind = self._kinds.popleft()
            self._credit += self._left
            self._measured += 1
            if kind == _NOTHING:
                self._bare.append(seconds)
                if 0 <= ours < seconds:
                    self._ours.append(ours / (seconds - ours))
                    self._between = median(self._ours)
            elif len(self._bare) >= _SEEN - 1:
                self._extra[kind].append(seconds / max(median(self._bare), 1e-9) - 1)
                self._pay(self._find_extra(kind))

    def _pay(self, extra: float) -> None:
        self._credit -= extra
        self._cost += extra
        if not self._is_chosen:
            return
        self._credit = min(self._credit, 2 * WINDOW * self._find_extra(_ALL))
        if self._open > self._step:  # a plan has not begun yet
            return
        is_too_much = self._price(self._gap, self._of_updates) > self._left
        found = self._find_gap(self._left if is_too_much else _FINER * self._left)
        if found != (self._gap, self._of_updates) and (is_too_much or found < (self._gap, self._of_updates)):
            self._plan(Agreed(self._find_begin(self._step), *found, -1, "cost", self._expect(*found)))

    def _find_extra(self, kind: int) -> float:
        """What recording adds to a step of this kind, as a share of a step's own time."""
        known = self._extra[kind] or self._extra[_ALL]
        beside = self._written / max(median(self._bare), 1e-9) if self._bare else 0.0
        return (max(median(known), 0.0) + beside) * (1 + self._between)

    def _expect(self, gap: int, of_updates: int) -> float:
        return self._price(gap, of_updates) + self._between

    def _price(self, gap: int, of_updates: int) -> float:
        less, more = self._find_extra(_STATISTICS), self._find_extra(_ALL)
        return less / gap + max(more - less, 0.0) / of_updates

    def _find_gap(self, share: float) -> tuple[int, int]:
        """The smallest gap that can be paid for, and then the smallest of updates, up to eight times as large."""
        gap = 1
        while gap < _MOST:
            for of_updates in (gap, 2 * gap, 4 * gap, 8 * gap):
                if self._price(gap, of_updates) <= share:
                    return gap, of_updates
            gap *= 2
        return _MOST, 8 * _MOST
