from __future__ import annotations

from typing import Any

import pytest

from retrograd.core.errors import RunWriteError
from retrograd.core.history.sink import Event, Moment, RowBatch
from retrograd.core.launch.late_sink import HELD, LateSink
from retrograd.core.runs.queue import Unwritten


class Notes:
    """A sink that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.lost = Unwritten()
        self.sites: list[str] = []

    def describe(self, **facts: Any) -> None:
        self.told.append(facts)

    def add_sites(self, names: Any) -> None:
        self.told.append(list(names))

    def add_rows(self, batch: RowBatch) -> None:
        self.told.append(batch)

    def add_event(self, event: Event) -> None:
        self.told.append(event)

    def add_tensor(self, kept: Any) -> None:
        self.told.append(kept)

    def add_file(self, name: str, write: Any) -> None:
        self.told.append(name)

    def flush(self) -> None:
        self.told.append("flush")

    def close(self, status: str = "finished") -> None:
        self.told.append(status)


class Desk:
    """A late sink, with what it calls."""

    def __init__(self, error: Exception | None = None) -> None:
        self.opened: list[Notes] = []
        self.steps = 0
        self.errors: list[Exception] = []
        self.error = error
        self.sink = LateSink(self.open, self.step_made, self.errors.append)

    def open(self) -> Notes:
        if self.error is not None:
            raise self.error
        self.opened.append(Notes())
        return self.opened[-1]

    def step_made(self) -> None:
        self.steps += 1


def batch(step: int, phase: Any = "train") -> RowBatch:
    return RowBatch(Moment(step, phase=phase), b"")


def test_nothing_is_opened_before_a_backward() -> None:
    desk = Desk()
    desk.sink.describe(model=1)
    desk.sink.add_sites(["a"])
    desk.sink.add_rows(batch(0, "eval"))
    desk.sink.flush()
    desk.sink.close()
    assert not desk.opened
    assert not desk.sink.is_open


def test_what_was_held_is_passed_on_in_order() -> None:
    desk = Desk()
    desk.sink.describe(model=1)
    desk.sink.add_sites(["a"])
    before, first, second = batch(0, "eval"), Event(Moment(0), "loss"), batch(1)
    for item in (before, first):
        desk.sink.add_rows(item) if isinstance(item, RowBatch) else desk.sink.add_event(item)
    desk.sink.add_sites(["b"])
    desk.sink.add_rows(second)
    desk.sink.close("failed")
    (notes,) = desk.opened
    assert notes.told == [{"model": 1}, ["a"], before, first, ["b"], second, "failed"]


def test_of_much_that_comes_before_only_the_end_is_held() -> None:
    desk = Desk()
    batches = [batch(step, "forward") for step in range(3 * HELD)]
    for each in batches:
        desk.sink.add_rows(each)
    last = batch(0)
    desk.sink.add_rows(last)
    assert desk.opened[0].told == [{}, [], *batches[-HELD:], last]


def test_trained_steps_are_counted_once() -> None:
    desk = Desk()
    for step, phase in ((0, "train"), (0, "train"), (0, "eval"), (1, "train"), (5, "train"), (1, "train")):
        desk.sink.add_rows(batch(step, phase))
    assert desk.steps == desk.sink.steps == 3


def test_where_updates_are_made_they_are_the_steps() -> None:
    """Passes that no update follows, and an evaluation behind the last one, are of no step that was made."""
    desk = Desk()
    for step in range(4):
        desk.sink.add_event(Event(Moment(step), "loss"))
        for kind in ("skipped",) if step == 1 else ("update", "update") if step < 3 else ():
            desk.sink.add_event(Event(Moment(step), kind))
    desk.sink.add_rows(batch(4))
    assert desk.sink.steps == 3


def test_a_forked_child_opens_a_sink_of_its_own() -> None:
    desk = Desk()
    desk.sink.describe(model=1)
    desk.sink.add_sites(["a"])
    desk.sink.add_rows(batch(0))
    told = list(desk.opened[0].told)
    desk.sink.start_over()
    desk.sink.add_rows(batch(1, "eval"))
    assert len(desk.opened) == 1
    desk.sink.add_rows(batch(1))
    assert desk.opened[0].told == told
    assert desk.opened[1].told == [{"model": 1}, ["a"], batch(1, "eval"), batch(1)]
    assert desk.sink.steps == 1


def test_files_wait_for_the_folder() -> None:
    desk = Desk()
    desk.sink.add_file("early", lambda file: None)
    desk.sink.add_rows(batch(0))
    desk.sink.add_file("late", lambda file: None)
    assert desk.opened[0].told == [{}, [], "early", batch(0), "late"]
    desk.sink.lose()
    desk.sink.add_file("lost", lambda file: None)
    assert "lost" not in desk.opened[0].told


@pytest.mark.parametrize(
    "error", [RunWriteError("disk full"), OSError(24, "Too many open files"), MemoryError(), ImportError("no segment")]
)
def test_training_goes_on_where_nothing_can_be_written(error: Exception) -> None:
    desk = Desk(error)
    for step in range(3):
        desk.sink.add_rows(batch(step))
    desk.sink.close()
    assert desk.errors == [desk.error]
    assert not desk.sink.is_open
    assert desk.sink.steps == 3


def test_an_error_of_ours_is_not_hidden() -> None:
    desk = Desk(ValueError("a fault"))
    with pytest.raises(ValueError, match="a fault"):
        desk.sink.add_rows(batch(0))


def test_what_was_lost_is_told() -> None:
    desk = Desk()
    assert desk.sink.lost == ""
    desk.sink.add_event(Event(Moment(0), "loss"))
    assert desk.sink.lost == ""
    desk.opened[0].lost += Unwritten(rows=1200)
    assert desk.sink.lost == "1,200 rows"
