import errno
import json
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any, BinaryIO, Self

import pytest
import torch

from retrograd.errors import NotARunError, RetrogradWarning, RunExistsError, RunWriteError
from retrograd.history.sink import Event, Moment
from retrograd.runs import files
from retrograd.runs.reader import open_run
from retrograd.runs.writer import RunWriter
from tests.history.made import make_batch, make_steps
from tests.runs.written import add_step, keep, open_writer, write_run
from tests.runs.written import files as list_files


def read_rank(run: Path) -> dict[str, Any]:
    return json.loads((run / "rank00000" / "rank.json").read_text())


def test_files_appear_without_being_asked_for(tmp_path: Path) -> None:
    writer = open_writer(tmp_path, flush_seconds=0.02)
    writer.add_rows(make_steps([0])[0])
    deadline = time.monotonic() + 30
    while not list_files(tmp_path, "statistics") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(open_run(tmp_path).history["a:output"]) == 1
    writer.close()


def test_the_status_is_told(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    run = open_run(tmp_path)
    assert run.status == "running"
    for batch in make_steps([4, 5]):
        writer.add_rows(batch)
    writer.add_event(Event(Moment(5), "fault", "a:output", text="oops"))
    writer.close("failed")
    writer.close()
    run.refresh()
    assert run.status == "failed"
    facts = run.ranks[0].facts
    assert (facts["first_step"], facts["last_step"], facts["rows"]) == (4, 5, 10)
    assert facts["events"] == {"fault": 1}
    assert facts["lost"] == {"rows": 0, "events": 0, "tensors": 0}


def test_adding_after_the_end_is_harmless(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    writer.close()
    writer.add_rows(make_steps([0])[0])
    writer.flush()
    assert list_files(tmp_path, "statistics") == []


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    writer.add_file("notes.txt", lambda file: file.write(b"kept"))
    folder = tmp_path / "rank00000"
    assert (folder / "notes.txt").read_bytes() == b"kept"

    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.warns(RetrogradWarning, match="No space left"):
        writer.add_file("more.txt", fail)
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == [".lock", "notes.txt", "rank.json"]
    writer.close()
    writer.add_file("late.txt", lambda file: None)
    assert not (folder / "late.txt").exists()


def test_a_reader_may_look_while_it_is_written(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    writer.flush()
    run = open_run(tmp_path)
    done = threading.Event()

    def write() -> None:
        for batch in make_steps(range(100)):
            add_step(writer, batch)
            writer.flush()
        done.set()

    writing = threading.Thread(target=write)
    writing.start()
    seen = []
    while not done.is_set():
        run.refresh()
        seen.append(
            (len(run.history["a:output"].rms), len(run.history.loss.steps), len(run.history["a:output"].tensors))
        )
        assert len(open_run(tmp_path).history["b:output"].rms) >= seen[-1][0]
    writing.join()
    run.refresh()
    assert seen == sorted(seen)
    assert run.history["a:output"].steps.tolist() == list(range(100))
    writer.close()


def test_a_folder_that_holds_another_run(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    with pytest.raises(RunExistsError, match="already holds a run"):
        RunWriter(tmp_path / "run")


def test_a_folder_that_holds_other_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    for options in ({}, {"resume": True}):
        with pytest.raises(RunExistsError, match=r"thesis\.tex"):
            RunWriter(tmp_path, **options)
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == ["thesis.tex"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run", "/dev/full/run"):
        with pytest.raises(RunWriteError, match="cannot be written"):
            RunWriter(path)


class FullDisk:
    """A file on a disk without room; what is written to it may be said to be there until it is flushed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def test_a_full_disk_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "create", create_on_full_disk)
    with pytest.raises(RunWriteError, match="No space left"):
        RunWriter(tmp_path / "run")
    monkeypatch.undo()
    assert not list(tmp_path.rglob(".tmp-*"))


def create_on_full_disk(path: Path) -> FullDisk:
    return FullDisk(path.open("wb"))


def create_on_full_device(path: Path) -> BinaryIO:
    return open("/dev/full", "wb")  # noqa: PTH123  # whoever asks for it closes it


@pytest.mark.parametrize("create", [create_on_full_disk, create_on_full_device])
def test_a_full_disk_during_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, create: Any) -> None:
    first, second, third = make_steps([0, 1, 2])
    writer = open_writer(tmp_path)
    add_step(writer, first)
    writer.flush()
    with monkeypatch.context() as patch:
        patch.setattr(files, "create", create)
        with pytest.warns(RetrogradWarning, match="No space left on device. Training goes on"):
            add_step(writer, second)
            writer.flush()
        with warnings.catch_warnings():  # it is said once
            warnings.simplefilter("error")
            add_step(writer, second)
            writer.flush()
    add_step(writer, third)
    with pytest.warns(RetrogradWarning, match="10 rows, 2 events and 2 tensors were not written"):
        writer.close()
    run = open_run(tmp_path)
    assert run.history["a:output"].steps.tolist() == [0, 2]
    assert [kept.step for kept in run.history["a:output"].tensors] == [0, 2]
    assert run.ranks[0].facts["lost"] == {"rows": 10, "events": 2, "tensors": 2}
    assert not list(tmp_path.rglob(".tmp-*"))


def test_a_folder_that_vanishes(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    with pytest.warns(RetrogradWarning, match="No such file or directory"):
        add_step(writer, make_steps([0])[0])
        writer.flush()
    with pytest.warns(RetrogradWarning, match="5 rows"):
        writer.close()


def test_a_warning_that_is_an_error_does_not_stop_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = open_writer(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writer.add_rows(make_steps([0])[0])
        writer.flush()
        writer.close()
    assert "retrograd: " in capsys.readouterr().err


def test_a_batch_that_makes_no_sense_costs_only_its_flush(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    nonsense = make_batch(Moment(0), {}, custom={"x": ([99], [1.0])})
    with pytest.warns(RetrogradWarning, match="not in its batch"):
        writer.add_rows(nonsense)
        writer.flush()
    writer.add_rows(make_steps([1])[0])
    writer.close()
    assert open_run(tmp_path).history["a:output"].steps.tolist() == [1]


def test_a_full_queue_loses_and_counts(tmp_path: Path) -> None:
    writer = open_writer(tmp_path, queue_bytes=5000)
    batches = make_steps(range(100))
    with writer._writing, pytest.warns(RetrogradWarning, match="queue full"):  # the writer is held up
        for batch in batches:
            writer.add_rows(batch)
    with pytest.warns(RetrogradWarning, match="rows"):
        writer.close()
    rows, lost = read_rank(tmp_path)["rows"], read_rank(tmp_path)["lost"]["rows"]
    assert rows + lost == 500
    assert 0 < rows < 100


def test_an_item_larger_than_the_queue_passes_alone(tmp_path: Path) -> None:
    writer = open_writer(tmp_path, queue_bytes=100)
    writer.add_tensor(keep(0, torch.zeros(1000)))
    writer.close()
    assert len(open_run(tmp_path).history["a:output"].tensors) == 1


LEFT_OPEN = """
import sys
from pathlib import Path
from tests.history.made import make_steps
from tests.runs.written import open_writer
writer = open_writer(Path(sys.argv[1]))
writer.add_rows(make_steps([0])[0])
exec(sys.argv[2])
"""


@pytest.mark.parametrize(
    ("end", "status", "rows"),
    [
        ("sys.exit(0)", "finished", 1),
        ("raise ValueError('the script is wrong')", "failed", 1),
        ("import os; os._exit(0)", "stopped", 0),
    ],
)
def test_a_writer_that_nobody_closes(tmp_path: Path, end: str, status: str, rows: int) -> None:
    subprocess.run([sys.executable, "-c", LEFT_OPEN, str(tmp_path), end], check=False, capture_output=True, timeout=60)
    run = open_run(tmp_path)
    assert run.status == status
    assert run.history.rows.count == 5 * rows


def test_a_path_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(NotARunError):
        open_run(tmp_path)
    assert list(tmp_path.iterdir()) == []
