import json
import os
from pathlib import Path

import pytest
import torch

from retrograd.core.errors import DamagedRunError
from retrograd.core.history.sink import Event, Moment
from retrograd.core.runs.rank_folder import RankFolder
from retrograd.core.runs.reader import open_run
from retrograd.core.runs.writer import RunWriter
from tests.core.history.made import make_steps
from tests.core.runs.written import add_step, files, keep, open_writer, sort_rows, write_run


def go_on(path: Path, steps: range, **options: object) -> None:
    writer = open_writer(path, resume=True, **options)
    for batch in make_steps(steps):
        add_step(writer, batch)
    writer.close()


@pytest.mark.parametrize("first", [0, 1, 4, 9, 10])
def test_no_step_is_there_twice(tmp_path: Path, first: int) -> None:
    whole = open_run(write_run(tmp_path / "whole", range(15)))
    write_run(tmp_path / "run", range(10))
    go_on(tmp_path / "run", range(first, 15), step=first)
    run = open_run(tmp_path / "run")
    assert sort_rows(run.history).equals(sort_rows(whole.history))
    assert run.history.loss.steps.tolist() == list(range(15))
    assert [event.moment.step for event in run.history.events] == list(range(15))
    assert [kept.step for kept in run.history["a:output"].tensors] == list(range(15))
    assert run.ranks[0].facts["rows"] == 75
    assert run.ranks[0].facts["events"] == {"loss": 15}


def test_a_part_with_steps_of_both_kinds_is_cut(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    for batch in make_steps(range(6)):
        add_step(writer, batch)
    writer.close()
    assert files(tmp_path, "statistics") == ["part-00000000-00000000.parquet"]
    size = (tmp_path / "rank00000" / "tensors" / "shard-00000000.safetensors").stat().st_size
    go_on(tmp_path, range(0), step=2)
    run = open_run(tmp_path)
    assert run.history["a:output"].steps.tolist() == [0, 1]
    assert [kept.tensor[0].item() for kept in run.history["a:output"].tensors] == [0, 1]
    assert run.ranks[0].facts["tensor_bytes"] < size


def test_it_goes_on_after_the_last_step(tmp_path: Path) -> None:
    write_run(tmp_path, range(4))
    with_step = RunWriter(tmp_path, resume=True)
    assert with_step.next_step == 4
    with_step.close()
    assert open_run(tmp_path).history["a:output"].steps.tolist() == [0, 1, 2, 3]
    chosen = RunWriter(tmp_path, resume=True, step=2)
    assert chosen.next_step == 2
    chosen.close()


def test_it_goes_on_after_a_flush_of_which_only_the_losses_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, range(2))
    killed = open_writer(tmp_path, resume=True)
    monkeypatch.setattr(RankFolder, "write_rows", lambda *_: None)
    add_step(killed, make_steps([2])[0])
    killed.close()
    monkeypatch.undo()
    go_on(tmp_path, range(3, 5))
    history = open_run(tmp_path).history
    assert history.loss.steps.tolist() == [event.moment.step for event in history.events] == [0, 1, 2, 3, 4]
    assert history["a:output"].steps.tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize("there", [False, True])
def test_nothing_to_go_on_with(tmp_path: Path, there: bool) -> None:
    path = tmp_path / "run"
    if there:
        path.mkdir()
    writer = RunWriter(path, resume=True)
    assert writer.next_step == 0
    writer.close()


def test_new_sites_and_other_rows_for_the_old(tmp_path: Path) -> None:
    write_run(tmp_path, range(2))
    writer = RunWriter(tmp_path, resume=True)
    writer.add_sites(["c:output", "a:output"])
    writer.add_rows(make_steps([2], n_sites=2)[0])
    writer.close()
    history = open_run(tmp_path).history
    assert history.sites[-1] == "c:output"
    assert len(history.sites) == 6
    assert history["a:output"].steps.tolist() == [0, 1, 2]
    assert history["c:output"].steps.tolist() == [2]


def test_the_manifest_tells_of_both_sessions(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    writer.describe(selection=["*"])
    writer.close()
    torch.manual_seed(7)
    writer = RunWriter(tmp_path, resume=True)
    writer.describe(model="bigger")
    writer.close()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["selection"] == ["*"]
    assert manifest["model"] == "bigger"
    (session,) = manifest["resumed"]
    assert session["seed"] == 7
    assert session["command"] == manifest["command"]


def test_tensors_of_before_count_in_the_budget(tmp_path: Path) -> None:
    write_run(tmp_path, range(3))
    taken = open_run(tmp_path).ranks[0].facts["tensor_bytes"]
    writer = open_writer(tmp_path, resume=True, tensor_budget=taken + 10)
    with pytest.warns(match="budget"):
        writer.add_tensor(keep(3, torch.ones(2)))
        writer.close()
    assert open_run(tmp_path).ranks[0].facts["tensor_bytes"] == taken


def test_leftovers_of_a_killed_writer_are_cleared(tmp_path: Path) -> None:
    write_run(tmp_path, range(2))
    leftover = tmp_path / "rank00000" / "statistics" / ".tmp-part-00000002-00000002.parquet"
    others = [tmp_path / "rank00000" / ".tmp-0123456789ab-rank.json", tmp_path / ".tmp-0123456789ab-manifest.json"]
    for other in others:
        other.write_bytes(b"{")
        os.utime(other, (0, 0))
    leftover.write_bytes(b"PAR1half of it")
    assert len(open_run(tmp_path).history["a:output"]) == 2
    go_on(tmp_path, range(2, 3))
    assert not leftover.exists()
    assert not any(other.exists() for other in others)
    assert len(open_run(tmp_path).history["a:output"]) == 3


@pytest.mark.parametrize("file", ["manifest.json", "rank00000/statistics/part-00000000-00000000.parquet"])
def test_a_damaged_run_is_not_gone_on_with(tmp_path: Path, file: str) -> None:
    write_run(tmp_path, range(2))
    (tmp_path / file).write_bytes(b"rubbish")
    with pytest.raises(DamagedRunError, match=file):
        RunWriter(tmp_path, resume=True, step=1)


def test_a_run_without_statistics_goes_on_after_its_last_loss(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    for step in range(3):
        writer.add_event(Event(Moment(step, 0, 0), "loss", value=1.0))
    writer.close()
    writer = RunWriter(tmp_path, resume=True)
    assert writer.next_step == 3
    writer.close()
