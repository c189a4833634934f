"""Gradients that come after the micro-batch of their forward was closed.

A generator runs before the critic's update, and its gradient comes after it; by then the critic's next forward has
begun a new step. Such a gradient is recorded under the step and micro-batch of its own forward, where its activation
is. It is known by its place: nothing has been seen there since.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from retrograd.history.sink import Moment, RowBatch
from retrograd.recording.batches import take_rows
from retrograd.recording.mode_buffer import ModeBuffer
from retrograd.recording.site_recorder import TensorRecorder
from retrograd.statistics.row import ROW

_REMEMBERED = 8
"""Closed micro-batches whose gradients are still known when they come late."""

Rows = npt.NDArray[np.int32]


class Waiting(Protocol):
    """The calls of one slot, whose tensors have been hooked."""

    serial: int
    """That of its buffer when the slot was last called; 0 before the first call."""

    def gradients(self) -> Iterable[TensorRecorder]:
        """Where the gradients of those tensors go."""


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

    Attributes:
        calls: what to ask.
    """

    def __init__(self) -> None:
        self.calls: list[Waiting] = []
        self._open: list[bytes] = []
        self._closed: deque[Closed] = deque(maxlen=_REMEMBERED)

    def note(self, rows: bytes) -> None:
        """These rows, as the bytes of int32, have been recorded for the micro-batch that is open."""
        self._open.append(rows)

    def close(self, buffer: ModeBuffer, moment: Moment) -> None:
        """That micro-batch is closed."""
        self._closed.append(Closed(buffer.opened, buffer.serial, moment, b"".join(self._open)))
        self._open.clear()

    def find(self, buffer: ModeBuffer) -> dict[TensorRecorder, Closed]:
        """The recorders whose tensors, if any came since the buffer was opened, are of an earlier micro-batch."""
        late: dict[TensorRecorder, Closed] = {}
        opened = buffer.opened
        for calls in self.calls:
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
