"""To which step and phase rows belong that were recorded together.

Where a model was called several times in a micro-batch, the rows of evaluations are taken apart: what an evaluation
recorded and what training did are each numbered from 1 again, as if the other had not been there.

Some gradients come after the micro-batch of their forward was closed: a generator runs before the critic's update, and
its gradient comes after it, when the critic's next forward has begun a new step. Such a gradient is recorded under the
step and micro-batch of its own forward, where its activation is. Its recorder tells: nothing has been seen there since.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from retrograd.history.sink import Moment, RowBatch
from retrograd.recording.mode_buffer import Forward, ModeBuffer
from retrograd.recording.module_watch import SiteRecorders, SlotCalls, SlotWatch
from retrograd.recording.site_recorder import TensorRecorder
from retrograd.recording.site_table import rename_rows, take_rows
from retrograd.recording.tensor_keeper import Kept, KeptSource
from retrograd.statistics.row import ROW


@dataclass
class Division:
    """Tells whose rows are whose, and what they are called then.

    Attributes:
        owners: for each row the evaluation that it belongs to.
        rows: rows that get another number, and which.
        tensor_recorders: the same of those of tensors.
    """

    owners: dict[int, Forward] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    tensor_recorders: dict[KeptSource, tuple[Forward | None, TensorRecorder]] = field(default_factory=dict)

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
    """Tell evaluations and training apart in what was just taken from a buffer; None where all is of one kind.

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


_REMEMBERED = 8
"""Closed micro-batches whose gradients are still known when they come late."""

Rows = npt.NDArray[np.int32]


@dataclass(slots=True)
class Closed:
    """A micro-batch that was closed.

    Attributes:
        first, last: the serials of its buffer.
        moment: when it was, at its last pass.
        rows: those that were recorded then, as the bytes of int32.
    """

    first: int
    last: int
    moment: Moment
    rows: bytes

    def place(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Whether each of these rows has been recorded before, so that this is another pass over it."""
        again = np.isin(rows, np.frombuffer(self.rows, np.int32))
        if again.any():
            self.moment = replace(self.moment, backward=self.moment.backward + 1)
        self.rows += rows.astype(np.int32).tobytes()
        return again


class LateGradients:
    """Finds gradients that come late.

    Args:
        calls: those of every slot, whose tensors have been hooked; the list grows.
    """

    def __init__(self, calls: Sequence[SlotCalls]) -> None:
        self._calls = calls
        self._open: list[bytes] = []
        self._closed: deque[Closed] = deque(maxlen=_REMEMBERED)

    def note(self, rows: bytes) -> None:
        """Note rows, as the bytes of int32, that were recorded for the micro-batch that is open."""
        self._open.append(rows)

    def close(self, buffer: ModeBuffer, moment: Moment) -> None:
        """Close that micro-batch."""
        self._closed.append(Closed(buffer.opened, buffer.serial, moment, b"".join(self._open)))
        self._open.clear()

    def find(self, buffer: ModeBuffer) -> dict[TensorRecorder, Closed]:
        """The recorders whose tensors, if any came since the buffer was opened, are of an earlier micro-batch."""
        late: dict[TensorRecorder, Closed] = {}
        opened = buffer.opened
        for calls in self._calls:
            serial = calls.serial
            if serial < opened:
                closed = next((each for each in self._closed if each.first <= serial <= each.last), None)
                if closed is not None:
                    late.update((tensor_recorder, closed) for tensor_recorder in calls.gradients())
        return late


def split_late(batch: RowBatch, late: Mapping[TensorRecorder, Closed]) -> Iterator[RowBatch]:
    """The rows of a batch, those that are late as batches of their own."""
    numbers = np.frombuffer(batch.rows, ROW)["row"]
    closed_of = {tensor_recorder.row: closed for tensor_recorder, closed in late.items()}
    is_late = np.isin(numbers, list(closed_of))
    if not is_late.all():
        yield take_rows(batch, ~is_late, batch.moment)
    for closed in {id(each): each for each in closed_of.values()}.values():
        mine = is_late & np.array([closed_of.get(number) is closed for number in numbers], dtype=bool)
        if not mine.any():
            continue
        again = np.zeros(len(numbers), dtype=bool)
        again[mine] = closed.place(numbers[mine])
        for chosen, backward in ((mine & ~again, 0), (again, closed.moment.backward)):
            if chosen.any():
                yield take_rows(batch, chosen, replace(closed.moment, backward=backward, phase="train"))
