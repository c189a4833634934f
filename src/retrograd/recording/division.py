"""Rows of a micro-batch in which a model was called several times: those of evaluations are taken apart.

What an evaluation recorded and what training did are each numbered from 1 again, as if the other had not been there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from retrograd.history.sink import Moment, RowBatch
from retrograd.recording.batches import rename_rows, take_rows
from retrograd.recording.forwards import Forward
from retrograd.recording.holder import Kept, Source
from retrograd.recording.lane import Lane
from retrograd.recording.module_watch import Places, SlotWatch
from retrograd.recording.stream import Stream
from retrograd.statistics.row import ROW


@dataclass
class Division:
    """Whose rows are whose, and what they are called then.

    Attributes:
        owners: for each row the evaluation that it belongs to.
        rows: rows that get another number, and which.
        streams: the same of streams.
    """

    owners: dict[int, Forward] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    streams: dict[Source, tuple[Forward | None, Stream]] = field(default_factory=dict)

    def add(self, owner: Forward | None, stream: Stream | None, target: Stream | None) -> None:
        """What came of ``stream`` belongs to this evaluation, or to training, and is called as that of ``target``."""
        if stream is None or target is None:
            return
        self.streams[stream] = owner, target
        if stream.row >= 0:
            self.rows[stream.row] = target.row
            if owner is not None:
                self.owners[stream.row] = owner

    def split_rows(self, batch: RowBatch) -> Iterator[RowBatch]:
        """The rows of training, and those of each evaluation."""
        owners = [self.owners.get(number) for number in np.frombuffer(batch.rows, ROW)["row"].tolist()]
        for owner in dict.fromkeys(owners):
            chosen = np.array([each is owner for each in owners], dtype=bool)
            yield rename_rows(take_rows(batch, chosen, _find_moment(batch.moment, owner)), self.rows)

    def split_kept(self, moment: Moment, kept: Sequence[Kept]) -> Iterator[tuple[Moment, list[Kept]]]:
        """The same of kept tensors."""
        by_owner: dict[Forward | None, list[Kept]] = {}
        for source, tensor, version, size in kept:
            owner, target = self.streams.get(source, (None, source))
            by_owner.setdefault(owner, []).append((target, tensor, version, size))
        for owner, items in by_owner.items():
            yield _find_moment(moment, owner), items


def divide(lane: Lane, slots: Sequence[SlotWatch], batches: Sequence[RowBatch], *, is_closing: bool) -> Division | None:
    """What is to be told apart of what was just taken from a lane; None where nothing is.

    Args:
        lane: where it was recorded.
        slots: the watches of outputs, inputs and tensors watched by hand.
        batches: the rows.
        is_closing: no further pass is waited for.
    """
    if len(lane.forwards) < 2 or lane.failed:
        return None
    calls = [_find_calls(slot, lane) for slot in slots]
    rows = {number for batch in batches for number in np.frombuffer(batch.rows, ROW)["row"].tolist()}
    trained = {
        lane.forwards.find(number, call)
        for number, of_slot in enumerate(calls)
        for call, places in enumerate(of_slot)
        if _has_gradient(places, rows)
    }
    if not lane.forwards.decide(trained, is_reached=lane.reached, is_closing=is_closing):
        return None
    division = Division()
    for number, slot in enumerate(slots):
        _divide_slot(division, number, slot, calls[number], lane)
    return division


def _divide_slot(division: Division, number: int, slot: SlotWatch, calls: Sequence[Places], lane: Lane) -> None:
    used: Counter[Forward | None] = Counter()
    for call, places in enumerate(calls):
        forward = lane.forwards[lane.forwards.find(number, call)]
        owner = forward if forward.is_evaluation else None
        for keys, place in list(places.items()):
            target = slot.find_place(lane, used[owner], keys)
            if place is not None and target is not None:
                division.add(owner, place.value, target.value)
                division.add(owner, place.gradient, target.gradient)
        used[owner] += 1


def _find_calls(slot: SlotWatch, lane: Lane) -> list[Places]:
    calls = slot.trained_calls
    return calls.places[: calls.count] if calls.serial == lane.serial else []


def _has_gradient(places: Places, rows: set[int]) -> bool:
    streams = (place.gradient for place in places.values() if place is not None)
    return any(stream is not None and stream.row in rows for stream in streams)


def _find_moment(moment: Moment, owner: Forward | None) -> Moment:
    return moment if owner is None else replace(moment, phase=owner.phase)
