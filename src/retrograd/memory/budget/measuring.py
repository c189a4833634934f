"""Measure a pass for a planner: what happens to saved tensors in it, and when."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from retrograd.core.hooks.engine import at_end_of_backward, current_graph_task, is_in_backward, is_in_compiled_backward
from retrograd.core.hooks.storages import is_held_elsewhere
from retrograd.memory.budget.simulation import Event, EventKind, MeasuredPass, SavedRange
from retrograd.memory.policies.policy import Packed, Saved

Mark = float | torch.cuda.Event


def take_time(values: Tensor) -> Mark:
    """Mark the present, as the device of these values sees it, without waiting for it."""
    if not values.is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(values.device))
    return event


def seconds_between(first: Mark, second: Mark) -> float:
    """Time between two marks; a device is waited for."""
    if isinstance(first, float) and isinstance(second, float) and not math.isnan(first + second):
        return max(0.0, second - first)
    if isinstance(first, torch.cuda.Event) and isinstance(second, torch.cuda.Event):
        first.synchronize()
        second.synchronize()
        return max(0.0, float(first.elapsed_time(second)) / 1000)
    return 0.0  # there is one mark alone, where a plan was followed at first


Key = tuple[int, torch.dtype, str]
"""Bytes, dtype and module of a range: what tells two passes apart."""


@dataclass(slots=True)
class ProgramHold:
    """A range that the program itself holds. ``values`` is not held here: the memory may go."""

    number: int
    item: weakref.ref[Packed]
    values: weakref.ref[Tensor]
    source: weakref.ref[torch.UntypedStorage]

    def is_left(self) -> bool:
        """Return whether the program has let go of it."""
        values = self.values()
        return self.source() is None if values is None else not is_held_elsewhere(values)


@dataclass(slots=True)
class PassNotes:
    """Records of one pass: from the first range that is packed until autograd holds nothing of it.

    Attributes:
        keys: of the ranges, in the order in which they were packed.
        shapes: of the tensors by which they were saved first.
        events: what happened, with marks before and after our own part in it.
        asked: ranges that were asked for.
        freed: ranges that autograd has let go of. It grows when objects are deleted, in any thread.
        left: range → position from which the program did not hold it.
        pending: those that it holds still.
        earlier: the first ranges as an earlier pass, which was the same so far, has shown them.
        background: bytes of earlier passes when it began.
        is_timed: whether the clock is read.
        unfinished: backward passes over it that have begun and not ended, as torch numbers them; those that an error or
            an interrupt has ended stay.
    """

    background: int = 0
    is_timed: bool = True
    keys: list[Key] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)
    events: list[tuple[EventKind, int, Mark, Mark]] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)
    freed: list[int] = field(default_factory=list)
    left: dict[int, int] = field(default_factory=dict)
    pending: list[ProgramHold] = field(default_factory=list)
    earlier: tuple[SavedRange, ...] = ()
    unfinished: set[int] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        """Whether autograd holds nothing of it any more."""
        return len(self.freed) == len(self.keys)

    def add(self, saved: Saved) -> int:
        """Record that a range is packed; returns its number."""
        self.keys.append((saved.nbytes, saved.values.dtype, saved.path))
        self.shapes.append(saved.shape)
        return len(self.keys) - 1

    def now(self, values: Tensor) -> Mark:
        """A mark, as the device of these values sees it; none where the time is of no use."""
        return take_time(values) if self.is_timed else math.nan

    def note(self, kind: EventKind, number: int, began: Mark, ended: Mark) -> None:
        """Record that something happened, with marks before and after."""
        self.events.append((kind, number, began, ended))

    def watch(self, number: int, item: Packed, values: Tensor) -> None:
        """Find out when the program lets go of a range."""
        source = weakref.ref(values.untyped_storage())
        self.pending.append(ProgramHold(number, weakref.ref(item), weakref.ref(values), source))

    @property
    def is_cut_short(self) -> bool:
        """Whether a backward pass over it was begun and has failed. Unknown while one runs."""
        return bool(self.unfinished) and not is_in_backward()

    def see_end_of_backward(self) -> None:
        """Notice whether the backward pass that runs now comes to its end."""
        task = current_graph_task()
        if task != -1 and task not in self.unfinished and not is_in_compiled_backward():
            self.unfinished.add(task)
            at_end_of_backward(partial(self.unfinished.discard, task))

    def look_after(self) -> None:
        """Find the ranges of which the program has let go."""
        if not self.pending:
            return
        still = []
        for pending in self.pending:
            if pending.item() is None:
                continue
            if pending.is_left():
                self.left[pending.number] = len(self.events)
            else:
                still.append(pending)
        self.pending = still

    def inherit(self, earlier: MeasuredPass) -> None:
        """Take over what an earlier pass, which was the same so far, has shown."""
        self.earlier = earlier.ranges[: len(self.keys) - 1]
        for number, saved_range in enumerate(self.earlier):
            if saved_range.left < len(self.events):
                self.left[number] = saved_range.left

    def make_recording(self) -> MeasuredPass:
        """The pass as plain data. A device is waited for."""
        events: list[Event] = [(kind, number) for kind, number, _, _ in self.events]
        at: dict[Event, int] = {}
        for position, event in enumerate(events):
            at.setdefault(event, position)
        ranges = []
        for number, (nbytes, dtype, path) in enumerate(self.keys):
            freed = at.get(("free", number), len(events))
            left = min(self.left.get(number, freed), freed)
            kind = f"{str(dtype).removeprefix('torch.')}{list(self.shapes[number])}"
            saved_range = SavedRange(nbytes, path, kind, at["pack", number], left, at.get(("ask", number)), freed)
            if number < len(self.earlier):
                saved_range = self.earlier[number].at_positions_of(saved_range)
            ranges.append(saved_range)
        return MeasuredPass(tuple(ranges), tuple(events), self._seconds(events), self.background)

    def time_again(self, recording: MeasuredPass) -> MeasuredPass | None:
        """An earlier pass with the times of this one; None where not the same happened. A device is waited for."""
        happened = {(kind, number) for kind, number, _, _ in self.events if kind != "free"}
        if happened != {event for event in recording.events if event[0] != "free"}:
            return None
        return replace(recording, seconds=self._seconds(recording.events))

    def _seconds(self, events: Sequence[Event]) -> tuple[float, ...]:
        """Computing time before each of these events since the one before it, without our own part in that.

        Where something is freed does not count, except at the end: it may be while we are at work.
        """
        timed = [event for event in self.events[:-1] if event[0] != "free"] + self.events[-1:]
        taken: dict[Event, float] = {}
        for (_, _, _, before), (kind, number, after, _) in pairwise(timed):
            taken[kind, number] = seconds_between(before, after)
        rest = taken.popitem()[1] if taken and timed[-1][0] == "free" else 0.0
        seconds = [taken.get(event, 0.0) for event in events]
        if events[-1][0] == "free":
            seconds[-1] = rest
        return tuple(seconds)
