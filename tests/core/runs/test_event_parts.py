"""Events of a run that is longer than memory are those of a short one, however its files grow and merge."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from retrograd.core.errors import DamagedRunError
from retrograd.core.history.history import History
from retrograd.core.history.sink import Event, Moment
from retrograd.core.history.table import read_events
from retrograd.core.limits import LIMITS
from retrograd.core.runs.event_parts import EventFiles, LastMicroBatches, LongEvents
from retrograd.core.runs.layout import EVENTS, list_parts, list_rank_folders
from retrograd.core.runs.reader import Run, open_run
from retrograd.core.runs.writer import RunWriter

RANKS = 3


def happen(step: int, rank: int) -> list[Event]:
    """What happens at a step: on rank 2 fewer micro-batches, now and then no loss."""
    random = np.random.default_rng([step, rank])
    found = []
    for micro in range(1 if rank == 2 else 2):
        value = [float("inf"), float("nan"), *random.standard_normal(8)][int(random.integers(10))]
        if random.random() < 0.9:
            found.append(Event(Moment(step, micro, 0), "loss", value=value, time=100.0 + step))
    kind = "skipped" if random.random() < 0.2 else "update"
    found.append(Event(Moment(step, micro, 0), kind, "AdamW", value=step, time=100.5 + step + rank))
    if step % 4 == rank:
        found.append(Event(Moment(step), "note", "fc:output", text=f"of rank {rank}"))
    return found


@pytest.fixture
def writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunWriter]:
    monkeypatch.setattr(LIMITS, "fan_in", 3)
    monkeypatch.setattr(LIMITS, "group_rows", 8)
    made = []
    for rank in range(RANKS):
        monkeypatch.setenv("RANK", str(rank))
        made.append(RunWriter(tmp_path / "run", join=True, flush_seconds=1e6))
    return made


def write(writers: list[RunWriter], first: int, last: int) -> None:
    for rank, writer in enumerate(writers):
        for step in range(first, last):
            for event in happen(step, rank):
                writer.add_event(event)
        writer.flush()


def tell(history: History) -> list[object]:
    """All that is asked of events, with the bits of each loss."""
    events, (steps, losses) = history.all_events, history.loss
    pieces = [piece for piece in events.pieces(["name", "step"], ["update", "skipped"]) if piece.num_rows]
    return [
        repr(history.events),
        events.count,
        repr(history.few_events),
        steps.tolist(),
        losses.tobytes(),
        events.times,
        [line for piece in pieces for line in piece.to_pylist()],
        repr(history.losses_at([3, 7, 1000])),
        history.losses_at([]),
        [repr(read_events(events.last(n))) for n in (0, 5, 1000)],
        repr(history.since(9).events),
        history.since(9).loss.values.tobytes(),
    ]


def test_they_are_those_of_a_short_run_while_it_grows(
    writers: list[RunWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = writers[0].path
    write(writers, 0, 3)
    short, opened = open_run(folder), open_run(folder)
    expected = tell(short.history)
    for first in (3, 4, 12):
        write(writers[first % 2 :], first, first + 1)  # the first rank is now and then behind
        short.refresh()
        expected = tell(short.history)
        with monkeypatch.context() as patch:
            patch.setattr(LIMITS, "held_events", 20)
            opened.refresh()
            assert isinstance(opened.history.all_events, LongEvents)
            assert tell(opened.history) == expected
            assert tell(open_run(folder).history) == expected
    for writer in writers:
        writer.close()
    monkeypatch.setattr(LIMITS, "held_events", 0)
    closed = open_run(folder)
    assert tell(closed.history) == expected
    assert repr(closed.events_by_rank) == repr(short.events_by_rank)


def test_last_micro_batches_of_ranks(writers: list[RunWriter]) -> None:
    write(writers, 0, 5)
    write(writers, 5, 9)
    files = EventFiles()
    run = Run(writers[0].path)
    listed = {
        path: (path, run.ranks[0].placements) for rank in run.ranks for _, path in list_parts(rank.folder / EVENTS)
    }
    files.load(listed, is_far=False, is_growing=False)
    by_rank = {
        rank: [part for path, part in files.parts.items() if f"rank{rank:05d}" in str(path)] for rank in range(3)
    }
    for rank, (steps, last) in LastMicroBatches(by_rank).items():
        assert steps.tolist() == list(range(9))
        assert last.tolist() == [int(rank != 2)] * 9
    assert not LastMicroBatches({2: by_rank[2]})
    for writer in writers:
        writer.close()


def test_a_file_that_is_gone_is_named(writers: list[RunWriter], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "held_events", 0)
    write(writers, 0, 3)
    history = open_run(writers[0].path).history
    loss, few = history.loss, history.few_events
    for folder in list_rank_folders(writers[0].path):
        for _, path in list_parts(folder / EVENTS):
            path.unlink()
    with pytest.raises(DamagedRunError, match=r"rank00000/events/part-.* is gone"):
        _ = history.events
    assert history.loss is loss
    assert len(few) == len(history.few_events)
    for writer in writers:
        writer.close()
