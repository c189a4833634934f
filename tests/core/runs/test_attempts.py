"""Whose folder a process takes over, and what becomes of the record in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from retrograd.core.history.sink import Event, Moment, RowBatch
from retrograd.core.runs import attempts
from retrograd.core.runs.attempts import name_attempt, read_attempt
from retrograd.core.runs.first_step import find_first_step
from retrograd.core.runs.reader import open_run
from retrograd.core.runs.writer import RunWriter
from retrograd.core.statistics.row import ROW
from tests.core.history.made import make_row, make_steps
from tests.core.runs.written import NEVER, add_step, write_run

NOTHING = np.empty(0)


def begin(monkeypatch: pytest.MonkeyPatch, launch: str, number: int) -> None:
    """Be another process, of this launch and attempt."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
    monkeypatch.setattr(attempts, "_name_process", lambda _: f"{launch}/{number}")


def attempt(path: Path, steps: range, step: int | None) -> RunWriter:
    writer = RunWriter(path, join=True, step=step, flush_seconds=NEVER)
    writer.add_sites(["a:output", "a:output.grad", "b:output", "b:output.grad", "b:weight.update"])
    for batch in make_steps(steps):
        add_step(writer, batch)
    writer.close()
    return writer


@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_later_attempt_goes_on_where_its_weights_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    begin(monkeypatch, "one", 0)
    attempt(tmp_path, range(4), None)
    begin(monkeypatch, "one", 1)
    attempt(tmp_path, range(step, 6), step)
    run = open_run(tmp_path)
    assert [rank.folder.name for rank in run.ranks] == ["rank00000"]
    assert run.history["a:output"].steps.tolist() == run.history.loss.steps.tolist() == list(range(6))
    assert [kept.step for kept in run.history["a:output"].tensors] == list(range(6))
    assert run.ranks[0].facts["attempt"]["step"] == step
    assert len(run.manifest["resumed"]) == 1


def test_what_it_does_not_go_on_with_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(monkeypatch, "one", 0)
    attempt(tmp_path, range(4), None)
    begin(monkeypatch, "one", 1)
    attempt(tmp_path, range(2), None)
    run = open_run(tmp_path)
    own, aside = run.ranks
    assert (own.folder.name, own.is_extra, aside.is_extra) == ("rank00000", False, True)
    assert run.history["a:output"].steps.tolist() == [0, 1]
    assert open_run(aside.folder).history["a:output"].steps.tolist() == [0, 1, 2, 3]


def test_of_a_first_step_that_was_not_whole_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss is known when its backward pass begins, and its rows when the next step does."""
    begin(monkeypatch, "one", 0)
    killed = RunWriter(tmp_path, join=True, flush_seconds=NEVER)
    killed.add_event(Event(Moment(0, 0, 0), "loss", value=9.0))
    killed.close("running")
    begin(monkeypatch, "one", 1)
    attempt(tmp_path, range(2), None)
    run = open_run(tmp_path)
    assert [rank.folder.name for rank in run.ranks] == ["rank00000"]
    assert run.history.loss.values.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("launch", "number"), [("one", 0), ("two", 1), ("", 0)])
def test_others_leave_a_record_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: str, number: int) -> None:
    begin(monkeypatch, "one", 0)
    attempt(tmp_path, range(4), None)
    begin(monkeypatch, launch, number)
    monkeypatch.setattr(attempts, "_name_process", lambda _: "other")
    attempt(tmp_path, range(1), None)
    assert open_run(tmp_path).history["a:output"].steps.tolist() == [0, 1, 2, 3]


def test_one_that_lives_keeps_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(monkeypatch, "one", 0)
    living = RunWriter(tmp_path, join=True, flush_seconds=NEVER)
    begin(monkeypatch, "one", 1)
    attempt(tmp_path, range(1), 0)
    living.close()
    assert [rank.is_extra for rank in open_run(tmp_path).ranks] == [False, True]


def write_updates(path: Path, weights: list[list[float]]) -> None:
    """A step for each list: updates made to weights of these sums of squares."""
    writer = RunWriter(path, join=True, flush_seconds=NEVER)
    writer.add_sites(["a:weight.update", "b:weight.update", "b:output"])
    for step, sums in enumerate(weights):
        made = [make_row(site, np.ones(2), reference) for site, reference in enumerate([*sums, 0.0])]
        rows, bins = np.array([row for row, _ in made], ROW), np.concatenate([bins for _, bins in made])
        writer.add_rows(RowBatch(Moment(step, 0, 0), rows.tobytes(), bins.astype(np.int64).tobytes()))
    writer.close()


@pytest.mark.parametrize(
    ("sums", "step"), [([1.0, 2.0], 0), ([2.5, 1.5], 1), ([1.25, 3.0, 9.0], 2), ([1.0, 3.0], None), ([], None)]
)
def test_the_step_is_that_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sums: list[float], step: int | None
) -> None:
    begin(monkeypatch, "one", 0)
    write_updates(tmp_path, [[1.0, 2.0], [1.5, 2.5], [1.25, 3.0]])
    assert find_first_step(tmp_path, lambda: pytest.fail("it is the first")) is None
    begin(monkeypatch, "one", 1)
    assert find_first_step(tmp_path, lambda: np.array(sums)) == step


def test_ranks_give_one_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose own record lacks the step looks at that of others, and at what they have decided."""
    begin(monkeypatch, "one", 0)
    for rank, weights in enumerate(([[1.0], [2.0], [3.0]], [[1.0]])):
        monkeypatch.setenv("RANK", str(rank))
        write_updates(tmp_path, weights)
    begin(monkeypatch, "one", 1)
    assert find_first_step(tmp_path, lambda: np.array([3.0])) == 2
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(attempts, "_name_process", lambda _: "rank 0")
    RunWriter(tmp_path, join=True, step=2).close()
    monkeypatch.setattr(attempts, "_name_process", lambda _: "rank 1")
    assert find_first_step(tmp_path, lambda: pytest.fail("it is known")) == 2


@pytest.mark.parametrize(
    "told", ["{", "{}", '{"attempt": 1}', '{"attempt": {"process": 1}}', '{"attempt": {"left": 3}}']
)
def test_what_others_may_have_written(tmp_path: Path, told: str) -> None:
    folder = write_run(tmp_path / "run") / "rank00000"
    (folder / "rank.json").write_text(told)
    assert read_attempt(folder) is None
    assert find_first_step(tmp_path / "run", lambda: NOTHING) is None
    assert find_first_step(tmp_path / "nowhere", lambda: NOTHING) is None


def test_it_is_told_as_it_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path) / "rank00000"
    assert read_attempt(folder) == name_attempt()
