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
from retrograd.recording.mode_buffer import ModeBuffer
from retrograd.recording.module_watch import SiteRecorders, SlotWatch
from retrograd.recording.site_recorder import TensorRecorder
from retrograd.statistics.row import ROW


@dataclass
class Division:
    """Whose rows are whose, and what they are called then.

    Attributes:
        owners: for each row the evaluation that it belongs to.
        rows: rows that get another number, and which.
        tensor_recorders: the same of those of tensors.
    """

    owners: dict[int, Forward] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    tensor_recorders: dict[Source, tuple[Forward | None, TensorRecorder]] = field(default_factory=dict)

    def add(self, owner: Forward | None, tensor_recorder: TensorRecorder | None, target: TensorRecorder | None) -> None:
        """Note that what came of one recorder is this forward's, and is called as that of ``target``."""
        if tensor_recorder is None or target is None:
            return
        self.tensor_recorders[tensor_recorder] = owner, target
        if tensor_recorder.row >= 0:
            self.rows[tensor_recorder.row] = target.row
            if owner is not None:
                self.owners[tensor_recorder.row] = owner

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
            owner, target = self.tensor_recorders.get(source, (None, source))
            by_owner.setdefault(owner, []).append((target, tensor, version, size))
        for owner, items in by_owner.items():
            yield _find_moment(moment, owner), items


def divide(
    buffer: ModeBuffer, slots: Sequence[SlotWatch], batches: Sequence[RowBatch], *, is_closing: bool
) -> Division | None:
    """What is to be told apart of what was just taken from a buffer; None where nothing is.

    Args:
        buffer: where it was recorded.
        slots: the watches of outputs, inputs and tensors watched by hand.
        batches: the rows.
        is_closing: no further pass is waited for.
    """
    if len(buffer.forwards) < 2 or buffer.failed:
        return None
    calls = [_find_calls(slot, buffer) for slot in slots]
    rows = {number for batch in batches for number in np.frombuffer(batch.rows, ROW)["row"].tolist()}
    trained = {
        buffer.forwards.find(number, call)
        for number, of_slot in enumerate(calls)
        for call, recorders in enumerate(of_slot)
        if _has_gradient(recorders, rows)
    }
    if not buffer.forwards.decide(trained, is_reached=buffer.reached, is_closing=is_closing):
        return None
    division = Division()
    for number, slot in enumerate(slots):
        _divide_slot(division, number, slot, calls[number], buffer)
    return division


def _divide_slot(
    division: Division, number: int, slot: SlotWatch, calls: Sequence[SiteRecorders], buffer: ModeBuffer
) -> None:
    used: Counter[Forward | None] = Counter()
    for call, recorders in enumerate(calls):
        forward = buffer.forwards[buffer.forwards.find(number, call)]
        owner = forward if forward.is_evaluation else None
        for keys, recorder in list(recorders.items()):
            target = slot.find_site_recorder(buffer, used[owner], keys)
            if recorder is not None and target is not None:
                division.add(owner, recorder.value, target.value)
                division.add(owner, recorder.gradient, target.gradient)
        used[owner] += 1


def _find_calls(slot: SlotWatch, buffer: ModeBuffer) -> list[SiteRecorders]:
    calls = slot.trained_calls
    return calls.recorders[: calls.count] if calls.serial == buffer.serial else []


def _has_gradient(recorders: SiteRecorders, rows: set[int]) -> bool:
    tensor_recorders = (recorder.gradient for recorder in recorders.values() if recorder is not None)
    return any(tensor_recorder is not None and tensor_recorder.row in rows for tensor_recorder in tensor_recorders)


def _find_moment(moment: Moment, owner: Forward | None) -> Moment:
    return moment if owner is None else replace(moment, phase=owner.phase)
