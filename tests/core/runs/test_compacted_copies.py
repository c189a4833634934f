"""Compacted copies of runs that go on being recorded: each row that was written is in them once."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from retrograd.core.cli import main
from retrograd.core.errors import RunExistsError, RunWriteError
from retrograd.core.history.sink import Moment
from retrograd.core.limits import LIMITS
from retrograd.core.runs import copying
from retrograd.core.runs.compaction import compact
from retrograd.core.runs.listing import read_line
from retrograd.core.runs.reader import open_run
from retrograd.core.runs.writer import RunWriter
from tests.core.history.made import make_batch
from tests.core.runs.written import add_step, open_writer

RANKS = 3
ELEMENTS = 20
COPY = "b:weight.update"
"""The same on all ranks: the last of the sites."""


def open_ranks(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunWriter]:
    writers = []
    for rank in range(RANKS):
        monkeypatch.setenv("RANK", str(rank))
        writers.append(open_writer(path, join=True))
        holds = {COPY: {"holds": "copy", "ranks": list(range(RANKS))}}
        writers[-1].describe(placements={"stages": {}, "sites": holds})
    monkeypatch.delenv("RANK")
    return writers


def elements_of(rank: int, step: int) -> dict[int, np.ndarray]:
    return {
        number: np.random.default_rng([step, number, 0 if number == 4 else rank]).standard_normal(ELEMENTS)
        for number in range(5)
    }


def add(writers: list[RunWriter], step: int) -> None:
    for rank, writer in enumerate(writers):
        add_step(writer, make_batch(Moment(step, 0, 0), elements_of(rank, step)))
        writer.flush()


def assert_whole(path: Path, steps: int) -> None:
    """By numpy, from all elements of all ranks; copies count once."""
    history = open_run(path).history
    for number, site in ((1, "a:output.grad"), (4, COPY)):
        parts = [
            np.concatenate([elements_of(rank, step)[number] for rank in range(1 if number == 4 else RANKS)])
            for step in range(steps)
        ]
        series = history[site]
        assert series.steps.tolist() == list(range(steps))
        assert series.count.tolist() == [len(part) for part in parts]
        assert series.max.tolist() == [part.max() for part in parts]
        np.testing.assert_allclose(series.std, [part.std() for part in parts], rtol=1e-12)
    assert history.loss.values.tolist() == list(range(steps))


def test_a_run_goes_on_beside_its_compacted_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, copy = tmp_path / "run", tmp_path / "copies" / "first"
    writers = open_ranks(run, monkeypatch)
    for step in range(6):
        add(writers, step)
    with pytest.raises(RunWriteError, match="still being recorded") as refused:
        compact(run)
    assert "-o DIR" in str(refused.value)
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["compact", str(run), "-o", str(copy)]) == 0
    assert "The rows of 3 ranks are merged" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files
    assert_whole(copy, 6)
    assert len(list(copy.rglob("statistics/*.parquet")) + list(copy.rglob("merged/*.parquet"))) == 1
    assert open_run(copy).status == read_line(copy).status == "running"
    assert [each.tensor[0].item() for each in open_run(copy).history["a:output"].tensors][::RANKS] == [*range(6)]
    with pytest.raises(RunExistsError):
        compact(run, copy)
    writers[2].close()
    writers[1]._claim.release()  # killed: its folder says that it runs, and nobody holds it
    writers[0].flush()
    for step in range(6, 8):
        add(writers[:1], step)
    compact(run, tmp_path / "second")
    assert [rank.status for rank in open_run(tmp_path / "second").ranks] == ["running", "stopped", "finished"]
    assert open_run(tmp_path / "second").history["a:output.grad"].count.tolist() == [60] * 6 + [20] * 2
    assert_whole(copy, 6)


def test_rows_that_are_merged_and_written_meanwhile_are_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMITS, "fan_in", 2)  # files vanish at each other flush
    run, steps, failed = tmp_path / "run", 24, []
    writers = open_ranks(run, monkeypatch)
    add(writers, 0)

    def write() -> None:
        try:
            for step in range(1, steps):
                add(writers, step)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    copies = 0
    while thread.is_alive() or not copies:
        copy = tmp_path / f"copy{copies}"
        compact(run, copy)
        counts = open_run(copy).history["a:output.grad"].count
        assert open_run(copy).history["a:output.grad"].steps.tolist() == [*range(len(counts))]
        assert counts[0] == RANKS * ELEMENTS
        assert (np.diff(counts) <= 0).all()  # of the last steps not all ranks had written yet
        copies += 1
    thread.join()
    assert not failed
    compact(run, tmp_path / "last")
    assert_whole(tmp_path / "last", steps)


def test_a_copy_that_cannot_be_made_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers = open_ranks(tmp_path / "run", monkeypatch)
    for step in range(3):
        add(writers, step)

    def fail(path: Path, target: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(copying, "_link", fail)
    with pytest.raises(RunWriteError, match="no space left"):
        compact(tmp_path / "run", tmp_path / "copy")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    monkeypatch.undo()
    monkeypatch.setattr(copying.os, "link", fail)  # as on a disk without links
    compact(tmp_path / "run", tmp_path / "copy")
    assert_whole(tmp_path / "copy", 3)
