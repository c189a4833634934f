"""The events of a run folder: of a long run losses and updates stay in their files, and are read when asked for."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from retrograd.core.history.ahead import read_each
from retrograd.core.history.arrays import give_back, read_numbers, to_coded_texts
from retrograd.core.history.curve import Curve
from retrograd.core.history.events import OF_EACH_STEP, Events, Losses, LossSums, find_times, pick_kinds, read_losses
from retrograd.core.history.outline import from_runs, to_runs
from retrograd.core.history.steps import number_steps
from retrograd.core.history.table import (
    EVENT_SCHEMA,
    NO_EVENTS,
    OF_LOSSES,
    filter_rows,
    find_kinds,
    find_last_micro_batches,
    pick_losses,
)
from retrograd.core.limits import LIMITS
from retrograd.core.runs.damage import Damages
from retrograd.core.runs.parts import PartFile, explain_damage, explain_vanished
from retrograd.core.runs.placements import Placements

IntArray = npt.NDArray[np.int64]


class EventPart:
    """A part file of events, which has been read once.

    Args:
        path: of the file.
        placements: by which sites are named in the history.

    Attributes:
        count: of its events.
        steps: the first and the last step of each row group.
        few: events of which not each step has one.
        times: the first and the last moment of which the time is known.
        held: all of it; None where that is not in memory.
        losses: None once they were added up.

    Raises:
        DamagedRunError: it cannot be read.
    """

    def __init__(self, path: Path, placements: Placements) -> None:
        self.path, self._placements = path, placements
        self.count = 0
        self.groups: list[tuple[int, int]] = []
        self.times: tuple[float, float] | None = None
        self._lasts: list[tuple[IntArray, IntArray]] = []
        few, whole = [NO_EVENTS], [NO_EVENTS]
        losses: list[Losses] = []
        for piece in self._read(EVENT_SCHEMA.names):
            self._note(piece)
            few.append(filter_rows(piece, ~find_kinds(piece, OF_EACH_STEP)))
            losses.append(read_losses(piece))
            whole = [*whole, piece] if self.count <= LIMITS.held_events else []
        self.few = join_events(few)
        self.held: pa.Table | None = join_events(whole) if whole else None
        self._losses = losses if self.held is None else None

    @property
    def has_micro_batches(self) -> bool:
        """True if any update came behind several micro-batches."""
        return any(last.any() for _, last in self._lasts)

    def steps(self) -> tuple[int, int]:
        """The first and the last step."""
        lows, highs = zip(*(self.groups or [NO_STEPS]), strict=True)
        return min(lows), max(highs)

    def list_updated(self) -> Iterator[tuple[IntArray, IntArray]]:
        """Steps that have ended in an update, and the last micro-batch of each, for one row group after the other."""
        for runs, last in self._lasts:
            steps = from_runs(runs)
            yield steps, np.broadcast_to(last, len(steps))

    def list_losses(self) -> Iterator[Losses]:
        """Losses, piece by piece, also those that were let go of."""
        return iter(self._losses) if self._losses is not None else map(read_losses, self.pieces(OF_LOSSES))

    def let_go(self) -> None:
        """Hold no more of it than what is few."""
        self.held = self._losses = None

    def pieces(self, names: Sequence[str], first: int | None = None, last: int | None = None) -> Iterator[pa.Table]:
        """Columns of all of its events; row groups that have none between two steps may be left out."""
        return self._read(names, first, last) if self.held is None else iter([self.held.select(list(names))])

    def _note(self, piece: pa.Table) -> None:
        """Record what there is to tell of a row group."""
        steps = read_numbers(piece["step"])
        self.count += len(steps)
        self.groups.append((int(steps.min()), int(steps.max())) if len(steps) else NO_STEPS)
        found = find_times(piece)
        if found is not None:
            low, high = self.times or found
            self.times = min(low, found[0]), max(high, found[1])
        updated, last = find_last_micro_batches(piece)
        if len(updated):
            self._lasts.append((to_runs(updated), last if last.any() else _NONE))

    def _read(self, names: Sequence[str], first: int | None = None, last: int | None = None) -> Iterator[pa.Table]:
        file = PartFile(self.path)
        with explain_damage(self.path):
            for number in range(file.metadata.num_row_groups):
                low, high = self.groups[number] if number < len(self.groups) else _ANY_STEP
                if (first is None or high >= first) and (last is None or low <= last):
                    yield self._check(file.read_group(number, names), names)

    def _check(self, piece: pa.Table, names: Sequence[str]) -> pa.Table:
        schema = pa.schema([EVENT_SCHEMA.field(name) for name in names])
        piece = piece.select(list(names))
        piece = piece if piece.schema.equals(schema) else piece.cast(schema)
        if empty := [name for name in names if piece[name].null_count]:
            raise ValueError(f"{empty[0]!r} of an event is missing")
        if "name" not in names or not self._placements.stages:
            return piece
        sites = [self._placements.rename(name) if ":" in name else name for name in piece["name"].to_pylist()]
        return piece.set_column(schema.get_field_index("name"), schema.field("name"), to_coded_texts(sites))


class LastMicroBatches(Mapping[int, tuple[IntArray, IntArray]]):
    """Of each rank the steps that have ended in an update, rising, and the last micro-batch of each.

    There are none where no step has more than one.

    Args:
        parts: by rank.
    """

    def __init__(self, parts: Mapping[int, Sequence[EventPart]]) -> None:
        self._parts = parts if any(part.has_micro_batches for of_rank in parts.values() for part in of_rank) else {}

    def __getitem__(self, rank: int) -> tuple[IntArray, IntArray]:
        found = [(_NO_STEP, _NO_STEP), *(each for part in self._parts[rank] for each in part.list_updated())]
        steps, groups = number_steps(np.concatenate([steps for steps, _ in found]))
        lasts = np.zeros(len(steps), np.int64)
        np.maximum.at(lasts, groups, np.concatenate([last for _, last in found]))
        return steps, lasts

    def __iter__(self) -> Iterator[int]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


NO_STEPS = int(np.iinfo(np.int64).max), int(np.iinfo(np.int64).min)
_ANY_STEP = NO_STEPS[::-1]
_NO_STEP = np.empty(0, np.int64)
_NONE = np.zeros(1, np.int64)
"""The last micro-batch of each step, where that is the first."""


def join_events(tables: Iterable[pa.Table]) -> pa.Table:
    """Events of one table after those of the other."""
    return pa.concat_tables([NO_EVENTS, *tables]).unify_dictionaries()


class LongEvents(Events):
    """Events of a run that are too many to hold.

    Args:
        parts: those of one rank after those of the other.
        loss: of each step.
    """

    def __init__(self, parts: Sequence[EventPart], loss: Curve) -> None:
        self._parts, self._loss = parts, loss

    @property
    def table(self) -> pa.Table:
        """All of them, read from their files."""
        return join_events(self._read(EVENT_SCHEMA.names))

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(part.count for part in self._parts)

    @cached_property
    def few(self) -> pa.Table:
        """Those of which not each step has one."""
        return join_events(part.few for part in self._parts)

    @property
    def loss(self) -> Curve:
        """The loss of each step."""
        return self._loss

    @property
    def times(self) -> tuple[float, float] | None:
        """See Events."""
        known = [part.times for part in self._parts if part.times is not None]
        return (min(low for low, _ in known), max(high for _, high in known)) if known else None

    def pieces(self, names: Sequence[str], kinds: Collection[str]) -> Iterator[pa.Table]:
        """See Events."""
        for piece in self._read(list(dict.fromkeys((*names, "kind")))):
            yield pick_kinds(piece, names, kinds)

    def losses_at(self, steps: Collection[int]) -> pa.Table:
        """See Events."""
        if not steps:
            return NO_EVENTS
        found = self._read(EVENT_SCHEMA.names, min(steps), max(steps))
        return join_events(pick_losses(piece, steps) for piece in found)

    def last(self, n: int) -> pa.Table:
        """See Events."""
        found: list[pa.Table] = []
        for number in reversed(range(len(self._parts))):
            if sum(piece.num_rows for piece in found) >= n:
                break
            found = [*self._read_part(number, EVENT_SCHEMA.names), *found]
        return Events(join_events(found)).last(n)

    def since(self, step: int) -> Events:
        """Those of this step and later ones, read when they are asked for."""
        return _LaterEvents(self, step)

    def read_since(self, step: int) -> pa.Table:
        """Those of this step and later ones."""
        return join_events(Events(piece).since(step).table for piece in self._read(EVENT_SCHEMA.names, step))

    def _read(self, names: Sequence[str], first: int | None = None, last: int | None = None) -> Iterator[pa.Table]:
        for number, part in enumerate(self._parts):
            low, high = part.steps()
            if (first is None or high >= first) and (last is None or low <= last):
                yield from self._read_part(number, names, first, last)

    def _read_part(self, number: int, names: Sequence[str], *steps: int | None) -> Iterator[pa.Table]:
        """Columns of a part.

        Raises:
            DamagedRunError: it is gone.
        """
        part = self._parts[number]
        try:
            yield from part.pieces(names, *steps)
        except FileNotFoundError as error:
            raise explain_vanished(part.path) from error


class _LaterEvents(Events):
    def __init__(self, events: LongEvents, step: int) -> None:
        self._events, self._step = events, step

    @cached_property
    def table(self) -> pa.Table:  # it is read once, when it is asked for
        return self._events.read_since(self._step)


# ---- those of a run that grows ----


class EventFiles:
    """The part files of events of a run, as far as they have been read.

    Attributes:
        events: of all of them.
        parts: by the keys that they were listed by.
        damages: files that could not be read, which are passed over.
    """

    def __init__(self) -> None:
        self.damages = Damages()
        self.events = Events()
        self.parts: dict[Hashable, EventPart] = {}
        self._sums: LossSums | None = None
        """Losses of these parts, where more of them are to follow."""

    def load(self, listed: Mapping[Hashable, tuple[Path, Placements]], *, is_far: bool, is_growing: bool) -> None:
        """Read those that are new, and let go of those that are gone.

        Args:
            listed: those of a rank after those of the other, by any key that a file has as long as it is the same one.
            is_far: they are in a store.
            is_growing: somebody writes more of them.

        Raises:
            FileNotFoundError: a file is not there (any more).
        """
        before, try_to = self.parts, self.damages.try_to
        listed = {key: each for key, each in listed.items() if key not in self.damages}
        if list(listed) == list(before):
            return
        new = (partial(try_to, key, partial(EventPart, *each)) for key, each in listed.items() if key not in before)
        read = read_each(new, is_far=is_far)
        sums, self._sums = self._sums, None
        parts: dict[Hashable, EventPart] = {}
        waiting: list[EventPart] = []
        count, anew = 0, LossSums()
        for key in listed:
            part = before[key] if key in before else next(read)
            if part is None:
                continue
            parts[key] = part
            count += part.count
            waiting.append(part)
            if sums is None and count > LIMITS.held_events:
                _move_losses(waiting, anew)
        every = list(parts.values())
        give_back()
        if count <= LIMITS.held_events:
            self.events = Events(join_events(piece for part in every for piece in part.pieces(EVENT_SCHEMA.names)))
        else:
            if sums is None:
                sums = anew
            elif changed := before.keys() ^ parts.keys():
                first = min((before | parts)[key].steps()[0] for key in changed)
                sums.cut(first)
                _move_losses([part for part in every if part.steps()[1] >= first], sums, first)
            self.events = LongEvents(every, sums.curve if is_growing else sums.finish())
            self._sums = sums if is_growing else None
        self.parts = parts


def _move_losses(parts: list[EventPart], sums: LossSums, first: int = NO_STEPS[1]) -> None:
    """Add up losses from some step on, and let go of all that is not few."""
    for part in parts:
        for losses in part.list_losses():
            sums.add(losses.since(first))
        part.let_go()
    parts.clear()
