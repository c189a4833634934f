"""A run folder at an address, in memory; ``tests/core/runs/test_object_storage.py`` has a real store."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.addresses import open_folder
from retrograd.core.cli import main
from retrograd.core.errors import NotARunError, RetrogradWarning, RunExistsError, RunWriteError
from retrograd.core.limits import LIMITS

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("upath")


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The store of this process, empty."""
    monkeypatch.chdir(tmp_path)
    store = fsspec.filesystem("memory")
    store.rm("/", recursive=True) if store.ls("/") else None
    yield store
    store.store.clear()
    store.pseudo_dirs[:] = [""]


def train_open(where: str | Path | None, steps: int = 3, **options: Any) -> tuple[Any, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = rg.record(model, where, **options)
    for step in range(steps):
        model(torch.full((4, 2), step + 1.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return recording, [each.detach().clone() for each in model.parameters()]


def train(where: str | Path | None, steps: int = 3, **options: Any) -> tuple[Any, list[torch.Tensor]]:
    recording, weights = train_open(where, steps, **options)
    recording.close()
    return recording, weights


def test_what_is_written_to_an_address_is_what_is_written_to_a_folder(memory: Any, tmp_path: Path) -> None:
    _, local = train(tmp_path / "run", tensors="*")
    recording, remote = train("memory://runs/a", tensors="*")
    assert all(map(torch.equal, local, remote))
    here, there = rg.open_run(tmp_path / "run"), rg.open_run("memory://runs/a")
    assert there.status == "finished"
    assert str(there.path) == str(recording.path) == "memory://runs/a"
    assert here.history.site_names == there.history.site_names
    for site in here.history.site_names:
        assert here.history[site].steps.tolist() == there.history[site].steps.tolist()
        assert here.history[site].rms.tobytes() == there.history[site].rms.tobytes()
    names = {str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert {name.removeprefix("/runs/a/") for name in memory.find("/runs/a")} == names - {".lock"}
    kept = [kept.load() for kept in there.history["0:output"].tensors]
    assert [each.tolist() for each in kept] == [kept.load().tolist() for kept in here.history["0:output"].tensors]


def test_the_views_of_a_run_at_an_address(memory: Any, capsys: pytest.CaptureFixture[str]) -> None:
    train("memory://runs/a")
    assert main(["view", "memory://runs/a"]) == 0
    assert "0:output" in capsys.readouterr().out
    assert main(["explain", "memory://runs/a"]) == 0
    assert memory.exists("/runs/a/findings.jsonl")
    assert main(["report", "memory://runs/a"]) == 0
    assert memory.cat_file("/runs/a/report.html").startswith(b"<!doctype html>")
    assert main(["export", "memory://runs/a", "--to", "csv"]) == 0
    assert b"0:output" in memory.cat_file("/runs/a/statistics.csv")
    assert main(["compare", "memory://runs/a", "memory://runs/a"]) == 0
    assert main(["hangs", "memory://runs/a"]) == main(["replay", "memory://runs/a"]) == 2
    assert "is an address" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ls", "serve"])
def test_what_reads_from_disks_alone_does_not_speak_of_writing(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "memory://runs/a"]) == 2
    said = capsys.readouterr().err
    assert "[not-a-run]" in said
    assert "reads from this machine alone" in said
    assert "retrograd explain" in said


def test_a_run_at_an_address_is_not_compacted(
    memory: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train("memory://runs/a")
    before = {name: memory.cat_file(name) for name in memory.find("/")}
    run = rg.open_run("memory://runs/a")
    with pytest.raises(RunWriteError, match="might see half of it") as raised:
        rg.compact(run)
    assert "[run-not-writable]" in str(raised.value)
    assert "copy the run to a disk" in str(raised.value)
    monkeypatch.setattr(type(memory), "cat_file", None)  # nothing is fetched for it
    assert main(["compact", "memory://runs/a"]) == 2
    assert "is not a folder on a disk" in capsys.readouterr().err
    monkeypatch.undo()
    assert {name: memory.cat_file(name) for name in memory.find("/")} == before


def test_a_run_at_an_address_is_resumed_and_its_small_parts_are_merged(memory: Any) -> None:
    for begin in range(LIMITS.fan_in + 2):
        train("memory://runs/a", steps=1, resume=begin > 0)
    parts = memory.find("/runs/a/rank00000/statistics")
    assert len(parts) == 3  # one of 32, and two that wait
    run = rg.open_run("memory://runs/a")
    assert run.history["0:output"].steps.tolist() == list(range(LIMITS.fan_in + 2))
    train("memory://runs/a", steps=1, resume={"step": 5})
    assert rg.open_run("memory://runs/a").history["0:output"].steps.tolist() == list(range(6))


@pytest.mark.parametrize("kind", ["statistics", "events"])
def test_files_are_fetched_side_by_side(memory: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    for steps in (3, 6):  # a part each
        train("memory://runs/a", steps, resume=steps > 3)
    plain, begun, second = type(memory).cat_file, [], threading.Event()

    def fetch(self: Any, name: str, **where: Any) -> bytes:
        if f"/{kind}/" in name:
            begun.append(name)
            if len(begun) > 1:
                second.set()
            assert second.wait(20)  # none is given out before two are asked for
        return bytes(plain(self, name, **where))

    monkeypatch.setattr(type(memory), "cat_file", fetch)
    assert rg.open_run("memory://runs/a").history["0:output"].steps.tolist() == list(range(9))


def hang(monkeypatch: pytest.MonkeyPatch, memory: Any) -> threading.Event:
    """Have the store answer nothing that is put, until this is set."""
    plain, answers = type(memory).pipe_file, threading.Event()

    def wait(*words: Any, **named: Any) -> Any:
        answers.wait(100)
        return plain(*words, **named)

    monkeypatch.setattr(type(memory), "pipe_file", wait)
    return answers


def test_the_end_waits_for_a_store_that_hangs_but_not_for_ever(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recording, _ = train_open("memory://runs/a")
    answers = hang(monkeypatch, memory)
    monkeypatch.setattr(LIMITS, "last_words_seconds", 0.2)
    with pytest.warns(RetrogradWarning, match="has not answered(.|\n)*All of it is in .*runs/memory-runs-a-"):
        recording.close()
    assert rg.open_run(recording._sink.folder).history["0:output"].steps.tolist() == [0, 1, 2]
    answers.set()  # it answers after all, and the program still runs
    recording._sink._upload._thread.join(100)
    there = rg.open_run("memory://runs/a")
    assert there.status == "finished"
    assert there.history["0:output"].steps.tolist() == [0, 1, 2]


def test_a_flush_does_not_wait_for_ever_and_is_made_up_for(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recording, _ = train_open("memory://runs/a")
    answers = hang(monkeypatch, memory)
    monkeypatch.setattr(LIMITS, "last_words_seconds", 0.2)
    with pytest.warns(RetrogradWarning, match="has not answered a flush"):
        recording.flush()
    monkeypatch.setattr(LIMITS, "last_words_seconds", 100)
    recording.flush()  # returns, though the first one still waits
    answers.set()
    recording.close()
    assert rg.open_run("memory://runs/a").history["0:output"].steps.tolist() == [0, 1, 2]


def test_what_a_store_refuses_lies_in_the_local_folder(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recording, _ = train_open("memory://runs/a")

    def refuse(*words: Any, **named: Any) -> None:
        raise ConnectionRefusedError("nobody is there")

    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "pipe_file", refuse)
        with pytest.warns(RetrogradWarning) as told:
            recording.close()
    texts = [str(each.message) for each in told]
    assert any("Training goes on" in text for text in texts)
    assert "copy that folder" in texts[-1]
    memory.put(f"{recording._sink.folder}/", "/runs/a/", recursive=True)  # as it says
    assert rg.open_run("memory://runs/a").history["0:output"].steps.tolist() == [0, 1, 2]


def test_what_was_put_before_a_kill_is_there(memory: Any) -> None:
    recording, _ = train_open("memory://runs/a")
    recording.flush()
    assert {name for name in memory.find("/runs/a") if "/.tmp-" in name} == set()
    opened = rg.open_run("memory://runs/a")
    assert opened.status == "running"
    assert opened.history["0:output"].steps.tolist() == [0, 1, 2]
    recording.close()


def test_a_folder_that_holds_something_is_refused(memory: Any) -> None:
    train("memory://runs/a")
    with pytest.raises(RunExistsError, match="already holds a run"):
        train("memory://runs/a")
    shutil.rmtree("runs")
    with pytest.raises(RunExistsError, match="already holds a run"):
        train("memory://runs/a")
    with pytest.raises(NotARunError, match="does not exist"):
        rg.open_run("memory://runs/nothing")


def test_a_run_is_resumed_from_its_address_alone(memory: Any) -> None:
    train("memory://runs/a")
    shutil.copytree("runs", "before")
    shutil.rmtree("runs")  # as on another machine
    train("memory://runs/a", resume=True)
    assert rg.open_run("memory://runs/a").history["0:output"].steps.tolist() == list(range(6))
    shutil.rmtree("runs")
    shutil.copytree("before", "runs")
    with pytest.raises(RunExistsError, match="was written later"):
        train("memory://runs/a", resume=True)
    assert rg.open_run("memory://runs/a").history["0:output"].steps.tolist() == list(range(6))


# ---- addresses that are none ----


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("s3://", "names no folder"),
        ("s3://bucket", "names no folder"),
        ("s3://bucket/", "names no folder"),
        ("s3://bucket/../x", "'.' or '..'"),
        ("s3://bucket/a/./b", "'.' or '..'"),
        ("s3:/bucket/run", "needs '://'"),
        (Path("s3://bucket/run"), "needs '://'"),
        ("https://example.org/run", "is read-only"),
        ("file://elsewhere/run", "another machine"),
        ("nosuch://bucket/run", "cannot be reached"),
    ],
)
def test_an_address_of_no_folder_is_refused(
    address: str | Path, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunWriteError, match=says):
        rg.record(nn.Linear(1, 1), address)
    with pytest.raises(RunWriteError, match=says):
        rg.open_run(address)
    assert not list(tmp_path.iterdir())


def test_credentials_in_an_address_are_refused_and_not_printed() -> None:
    with pytest.raises(RunWriteError, match="a name or a password") as caught:
        rg.record(nn.Linear(1, 1), "s3://me:secret@bucket/run")
    assert "secret" not in str(caught.value)


def test_without_the_extra_an_address_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "upath", None)
    with pytest.raises(RunWriteError, match=r"pip install 'retrograd\[remote\]' s3fs"):
        rg.record(nn.Linear(1, 1), "s3://bucket/run")
    assert not list(tmp_path.iterdir())


def test_without_the_client_of_a_store_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(RunWriteError, match="pip install adlfs"):
        open_folder("abfs://container/run")


def test_a_file_address_is_a_folder_of_this_machine(tmp_path: Path) -> None:
    assert open_folder(f"file://{tmp_path}/a%20b") == tmp_path / "a b"
    train(f"file://{tmp_path}/run")
    assert (tmp_path / "run" / "manifest.json").is_file()


@pytest.mark.parametrize("name", ["a b", "%2F", "ü", "a" * 300, "#x", "a?b"])
def test_odd_names(memory: Any, name: str) -> None:
    train(f"memory://runs/{name}", steps=1)
    assert memory.exists(f"/runs/{name}/manifest.json")
    assert rg.open_run(f"memory://runs/{name}").status == "finished"


@pytest.mark.parametrize("name", [r"C:\runs", "a:b", "s3", "data:x"])
def test_names_that_look_like_addresses_are_folders(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(name, steps=1)
    assert (tmp_path / name / "manifest.json").is_file()
