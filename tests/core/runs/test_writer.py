import contextlib
import errno
import json
import os
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any, BinaryIO, Self

import pytest
import torch

from retrograd.core import files
from retrograd.core.errors import NotARunError, RetrogradWarning, RunExistsError, RunWriteError
from retrograd.core.history.sink import Event, Moment
from retrograd.core.runs.reader import open_run
from retrograd.core.runs.writer import RunWriter
from tests import warm
from tests.core.history.made import make_batch, make_steps
from tests.core.runs.written import add_step, keep, open_writer, write_run
from tests.core.runs.written import files as list_files


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
    first, *rest = make_steps(range(100))
    add_step(writer, first)
    writer.flush()
    run = open_run(tmp_path)
    done = threading.Event()

    def write() -> None:
        for batch in rest:
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


def create_without_descriptors(path: Path) -> BinaryIO:
    raise OSError(errno.EMFILE, "Too many open files")


FULL = pytest.mark.parametrize("create", [create_on_full_disk, create_on_full_device, create_without_descriptors])


@FULL
def test_a_disk_that_is_full_for_a_while_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, create: Any
) -> None:
    writer = open_writer(tmp_path)
    steps = make_steps(range(4))
    add_step(writer, steps[0])
    writer.flush()
    with monkeypatch.context() as patch:
        patch.setattr(files, "create", create)
        with pytest.warns(RetrogradWarning, match=r"(No space left on device|Too many open files)\. Training goes on"):
            add_step(writer, steps[1])
            writer.add_file("notes.txt", lambda file: file.write(b"kept"))
            writer.flush()
        with warnings.catch_warnings():  # it is said once
            warnings.simplefilter("error")
            add_step(writer, steps[2])
            writer.flush()
    add_step(writer, steps[3])
    writer.close()
    run = open_run(tmp_path)
    assert run.history["a:output"].steps.tolist() == [0, 1, 2, 3]
    assert run.history.loss.steps.tolist() == [0, 1, 2, 3]
    assert [kept.step for kept in run.history["a:output"].tensors] == [0, 1, 2, 3]
    assert run.ranks[0].facts["lost"] == {"rows": 0, "events": 0, "tensors": 0}
    assert (tmp_path / "rank00000" / "notes.txt").read_bytes() == b"kept"
    assert "lost" not in run.manifest
    assert not list(tmp_path.rglob(".tmp-*"))


@FULL
def test_what_has_no_room_to_wait_is_lost_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, create: Any
) -> None:
    writer = open_writer(tmp_path, queue_bytes=10_000)
    with monkeypatch.context() as patch, pytest.warns(RetrogradWarning):
        patch.setattr(files, "create", create)
        for batch in make_steps(range(100)):
            writer.add_rows(batch)
            writer.flush()
    with pytest.warns(RetrogradWarning, match=r"\d rows were not written"):
        writer.close()
    run = open_run(tmp_path)
    lost = run.ranks[0].facts["lost"]
    assert run.history.rows.count + lost["rows"] == 500
    assert 0 < run.history.rows.count < 500
    assert run.manifest["lost"]["rows"] == lost["rows"] == writer.lost.rows


def test_a_disk_that_stays_full_is_given_up_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = open_writer(tmp_path)
    add_step(writer, make_steps([0])[0])
    monkeypatch.setattr(files, "create", create_on_full_disk)
    with (
        pytest.warns(RetrogradWarning, match="No space left"),
        pytest.warns(RetrogradWarning, match="5 rows, 1 event and 1 tensor were not written"),
    ):
        writer.close()
    assert (writer.lost.rows, writer.lost.events, writer.lost.tensors) == (5, 1, 1)


def test_a_disk_that_is_full_when_the_program_ends_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = open_writer(tmp_path)
    add_step(writer, make_steps([0])[0])
    tries = []

    def create(path: Path) -> Any:
        tries.append(path)
        return create_on_full_disk(path) if len(tries) < 8 else path.open("xb")

    monkeypatch.setattr(files, "create", create)
    with pytest.warns(RetrogradWarning, match="No space left"):
        writer.close()
    assert open_run(tmp_path).history["a:output"].steps.tolist() == [0]
    assert not writer.lost


LIMITED = """
import warnings
warnings.simplefilter("ignore")
import resource, sys
from pathlib import Path
from tests.core.history.made import make_steps
from tests.core.runs.written import add_step, open_writer
writer = open_writer(Path(sys.argv[1]))
name, low = (resource.RLIMIT_FSIZE, 100) if sys.argv[2] == "size" else (resource.RLIMIT_NOFILE, 3)
usual = resource.getrlimit(name)
for step, batch in enumerate(make_steps(range(5))):
    resource.setrlimit(name, (low if 0 < step < 4 else usual[0], usual[1]))
    add_step(writer, batch)
    writer.flush()
writer.close()
"""


@pytest.mark.parametrize("limit", ["size", "descriptors"])
def test_limits_of_the_system_for_a_while(tmp_path: Path, limit: str) -> None:
    words = [sys.executable, "-c", LIMITED, str(tmp_path / "run"), limit]
    warm.run(words, check=True, timeout=60)
    run = open_run(tmp_path / "run")
    assert run.history["a:output"].steps.tolist() == list(range(5))
    assert run.history.loss.steps.tolist() == list(range(5))
    assert [kept.step for kept in run.history["a:output"].tensors] == list(range(5))


@pytest.mark.parametrize("removed", [".", "rank00000", "rank00000/statistics", "rank00000/events", "rank00000/.lock"])
def test_what_is_removed_is_made_again(tmp_path: Path, removed: str) -> None:
    writer = open_writer(tmp_path / "run")
    for step, batch in enumerate(make_steps(range(3))):
        if step == 1:
            (tmp_path / "run" / removed).rename(tmp_path / "elsewhere")
        with pytest.warns(RetrogradWarning, match="made again") if step == 1 else contextlib.nullcontext():
            add_step(writer, batch)
            writer.flush()
    writer.close()
    run = open_run(tmp_path / "run")
    assert set(run.history["a:output"].steps.tolist()) >= {1, 2}
    assert set(run.history.loss.steps.tolist()) >= {1, 2}
    assert [kept.step for kept in run.history["a:output"].tensors][-2:] == [1, 2]
    assert run.status == "finished"
    assert not writer.lost


def test_parts_that_are_removed_do_not_stop_the_merging_of_others(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    for step, batch in enumerate(make_steps(range(80))):
        writer.add_rows(batch)
        writer.flush()
        if step == 10:
            (tmp_path / "rank00000" / "statistics" / "part-00000003-00000003.parquet").unlink()
    writer.close()
    assert open_run(tmp_path).history["a:output"].steps.tolist() == [step for step in range(80) if step != 3]
    assert len(list_files(tmp_path, "statistics")) < 40


@pytest.mark.parametrize("is_over", [True, False])
def test_a_run_that_has_taken_the_place_of_a_removed_one_is_left_alone(tmp_path: Path, is_over: bool) -> None:
    writer = open_writer(tmp_path / "run")
    add_step(writer, make_steps([0])[0])
    writer.flush()
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    other = open_writer(tmp_path / "run")
    for batch in make_steps(range(50)):
        add_step(other, batch)
        other.flush()
    if is_over:
        other.close()
    theirs = read_all(tmp_path / "run")
    with pytest.warns(RetrogradWarning):
        add_step(writer, make_steps([1])[0])
        writer.flush()
        writer.close()
    found = read_all(tmp_path / "run")
    assert {name: found.get(name) for name in theirs} == theirs
    assert {name.split("/")[0] for name in found.keys() - theirs.keys()} <= {f"rank00000.p{os.getpid()}"}
    other.close()


def read_all(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_program_that_changes_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    finished = write_run(tmp_path / "after" / "run", range(50))
    theirs = read_all(finished)
    monkeypatch.chdir(tmp_path / "before")
    writer = open_writer(Path("run"))
    monkeypatch.chdir(tmp_path / "after")
    for batch in make_steps(range(10)):
        add_step(writer, batch)
        writer.flush()
    writer.close()
    assert read_all(finished) == theirs
    assert open_run(tmp_path / "before" / "run").history["a:output"].steps.tolist() == list(range(10))


def test_names_that_no_file_can_hold(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, flush_seconds=1e6)
    writer.add_sites(["l\udc80r:output", "b\0\n:output", "c:output"])
    writer.describe(model={"l\udc80r": "Linear"})
    [batch] = make_steps([0], n_sites=3)
    writer.add_rows(batch)
    writer.add_event(Event(Moment(0), "fault", "l\udc80r:output", text="no\ud800"))
    writer.add_tensor(keep(0, torch.ones(2), "l\udc80r:output"))
    writer.close()
    run = open_run(tmp_path)
    assert run.history.sites == ["l\\udc80r:output", "b\0\n:output", "c:output"]
    assert all(run.history[site].steps.tolist() == [0] for site in run.history.sites)
    assert [(event.name, event.text) for event in run.history.events] == [("l\\udc80r:output", "no\\ud800")]
    assert len(run.history["l\\udc80r:output"].tensors) == 1
    assert run.manifest["model"] == {"l\udc80r": "Linear"}
    assert run.manifest["sites"] == run.history.sites


def test_a_link_that_somebody_has_planted_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / ".tmp-manifest.json").symlink_to(precious)
    writer = open_writer(run)
    (run / "rank00000" / "rank.json").unlink()
    (run / "rank00000" / "rank.json").symlink_to(precious)
    (run / "rank00000" / "statistics" / ".tmp-part-00000000-00000000.parquet").symlink_to(precious)
    add_step(writer, make_steps([0])[0])
    writer.close()
    assert precious.read_text() == "mine"
    assert read_rank(run)["status"] == "finished"


def test_a_warning_that_is_an_error_does_not_stop_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = open_writer(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writer.add_rows(make_steps([0])[0])
        writer.flush()
        writer.close()
    assert "RetrogradWarning: " in capsys.readouterr().err


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


def test_tensors_that_were_held_are_written_when_they_come_all_at_once(tmp_path: Path) -> None:
    writer = open_writer(tmp_path, queue_bytes=5000)
    with writer._writing:  # the writer is held up
        for step in range(10):
            writer.add_tensor(keep(step, torch.full((1000,), float(step))))
        writer.add_rows(make_steps([0])[0])
    writer.close()
    history = open_run(tmp_path).history
    assert [kept.tensor.unique().item() for kept in history["a:output"].tensors] == list(range(10))
    assert history.rows.count == 5
    assert not writer.lost


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_died_costs_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = open_writer(tmp_path)
    writer.add_rows(make_steps([0])[0])
    with monkeypatch.context() as patch:
        patch.setattr(writer, "_write_all", lambda **how: sys.exit())
        writer._wake.set()
        writer._thread.join(60)
    writer.close()
    run = open_run(tmp_path)
    assert (run.history.rows.count, run.status) == (5, "finished")


def test_an_item_larger_than_the_queue_passes_alone(tmp_path: Path) -> None:
    writer = open_writer(tmp_path, queue_bytes=100)
    writer.add_tensor(keep(0, torch.zeros(1000)))
    writer.close()
    assert len(open_run(tmp_path).history["a:output"].tensors) == 1


LEFT_OPEN = """
import sys
from pathlib import Path
from tests.core.history.made import make_steps
from tests.core.runs.written import open_writer
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
    warm.run([sys.executable, "-c", LEFT_OPEN, str(tmp_path), end], check=False, capture_output=True, timeout=60)
    run = open_run(tmp_path)
    assert run.status == status
    assert run.history.rows.count == 5 * rows


def test_a_path_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(NotARunError):
        open_run(tmp_path)
    assert list(tmp_path.iterdir()) == []
