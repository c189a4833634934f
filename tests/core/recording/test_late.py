"""Splitting a batch of rows: those that come late go to the micro-batch of their forward, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from retrograd.core.history.sink import Moment, RowBatch
from retrograd.core.recording.emitter import Closed, LateGradients, Share, split_late, take_rows
from retrograd.core.recording.mode_buffer import Mode, ModeBuffer
from retrograd.core.statistics.row import ROW


class TensorRecorder:
    """All that is asked of one."""

    def __init__(self, row: int) -> None:
        self.row = row


def make_batch(rows: Iterable[int]) -> RowBatch:
    numbers = np.array(sorted(rows), np.int32)
    table = np.zeros(len(numbers), ROW)
    table["row"], table["calls"], table["bins"] = numbers, 1, numbers % 3
    bins = np.concatenate([np.empty(0, np.int64), *(np.full(row % 3, row, np.int64) for row in numbers)])
    custom = {"median": (numbers.tolist(), (numbers * 0.5).tolist())}
    return RowBatch(Moment(7, 2, 1), table.tobytes(), bins.tobytes(), 4.0, custom)


def take_apart(batch: RowBatch) -> dict[int, Any]:
    """Everything a batch says of each of its rows."""
    table, bins = np.frombuffer(batch.rows, ROW), np.frombuffer(batch.bins, np.int64)
    ends = np.cumsum(table["bins"])
    custom = dict(zip(*batch.custom["median"], strict=True))
    assert set(custom) == set(table["row"].tolist())
    return {
        int(row): (batch.moment, batch.scale, bins[end - n : end].tolist(), custom[row])
        for row, end, n in zip(table["row"], ends, table["bins"], strict=True)
    }


@given(
    st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30))
)
def test_each_row_comes_once_and_where_it_belongs(
    rows: set[int], first: set[int], second: set[int], again: set[int]
) -> None:
    second = second - first
    closed = [
        Closed(1, 3, Moment(5, 0, 0), np.array(sorted(again), np.int32).tobytes()),
        Closed(4, 4, Moment(6, 1, 2, "forward"), b""),
    ]
    late = {TensorRecorder(row): each for each, own in zip(closed, (first, second), strict=True) for row in own}
    seen: dict[int, Any] = {}
    batch = make_batch(rows)
    whole = Share(batch.moment, np.array(sorted(rows), np.int32))
    for share in split_late(whole, late):  # type: ignore[arg-type]
        part = take_rows(batch, share, picks=False)
        assert np.array_equal(share.numbers, np.frombuffer(part.rows, ROW)["row"])
        for row, facts in take_apart(part).items():
            assert row not in seen
            seen[row] = facts
    assert set(seen) == rows
    for row, (moment, scale, bins, median) in seen.items():
        assert (scale, bins, median) == (4.0, [row] * (row % 3), row * 0.5)
        if row in first:
            assert moment == Moment(5, 0, 1 if row in again else 0)
        elif row in second:
            assert moment == Moment(6, 1, 0)
        else:
            assert moment == Moment(7, 2, 1)


def test_a_row_that_is_late_again_and_again_counts_its_passes() -> None:
    closed = Closed(1, 1, Moment(5, 0, 0), b"")
    late = {TensorRecorder(3): closed}
    whole = Share(Moment(7), np.array([3], np.int32))
    passes = [[part.moment.backward for part in split_late(whole, late)] for _ in range(3)]  # type: ignore[arg-type]
    assert passes == [[0], [1], [2]]


def test_who_was_not_called_since_is_late() -> None:
    class Calls:
        def __init__(self, serial: int) -> None:
            self.serial = serial
            self.tensor_recorders = [TensorRecorder(serial)]

        def gradients(self) -> Any:
            return self.tensor_recorders

    never, old, current = calls = [Calls(0), Calls(1), Calls(2)]
    buffer = ModeBuffer(Mode.GRAD, lambda device: None, None)  # type: ignore[arg-type, return-value]
    late = LateGradients(calls)  # type: ignore[arg-type]
    assert late.find(buffer) == {}
    late.note(np.array([1], np.int32).tobytes())
    late.close(buffer, Moment(0))
    buffer.restart()
    found = late.find(buffer)
    assert set(found) == set(old.tensor_recorders)
    assert found[old.tensor_recorders[0]].moment == Moment(0)  # type: ignore[index]
    assert not {*never.tensor_recorders, *current.tensor_recorders} & set(found)  # type: ignore[arg-type]
    for _ in range(20):  # long ago
        late.close(buffer, Moment(1))
        buffer.restart()
    current.serial = buffer.serial
    assert late.find(buffer) == {}


def test_users_statistics_go_with_their_rows() -> None:
    batch = make_batch({1, 2})
    foreign = RowBatch(batch.moment, batch.rows, batch.bins, 1.0, {"median": ([1, 9], [0.5, 4.5])})
    share = Share(batch.moment, np.array([1, 2], np.int32))
    assert take_rows(foreign, share, picks=True).custom == {"median": ([1], [0.5])}
