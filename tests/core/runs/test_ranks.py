import multiprocessing
import os
from pathlib import Path

import pytest
import torch.distributed

from retrograd.core.errors import RetrogradWarning, RunExistsError
from retrograd.core.history.sink import Event, Moment
from retrograd.core.ranks.processes import ask_rank
from retrograd.core.runs.lock import Lock, is_locked
from retrograd.core.runs.ranks import check_vacant
from retrograd.core.runs.reader import open_run
from retrograd.core.runs.writer import RunWriter
from tests.core.history.made import SITES, make_batch, make_steps
from tests.core.runs.written import add_step, open_writer, write_run
from tests.processes import LOADED

CONTEXT = multiprocessing.get_context("forkserver")


def write_rank(path: Path, rank: int, all_there: "multiprocessing.synchronize.Barrier") -> None:
    os.environ["RANK"] = str(rank)
    writer = open_writer(path)
    all_there.wait(60)
    for batch in make_steps(range(4), seed=rank):
        add_step(writer, batch)
    writer.describe(told_by=rank)
    writer.close()


def test_a_reader_merges_the_ranks(tmp_path: Path) -> None:
    multiprocessing.set_forkserver_preload(list(LOADED))
    barrier = CONTEXT.Barrier(2)
    processes = [CONTEXT.Process(target=write_rank, args=(tmp_path, rank, barrier)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    run = open_run(tmp_path)
    assert [(rank.rank, rank.status) for rank in run.ranks] == [(0, "finished"), (1, "finished")]
    assert run.manifest["told_by"] == 0
    series = run.history["b:output"]
    assert series.count.tolist() == [16] * 4
    for rank in range(2):
        alone = open_run(tmp_path / f"rank{rank:05d}").history["b:output"]
        assert series.select(rank=rank).rms.tolist() == alone.rms.tolist()
    assert [kept.rank for kept in run.history["a:output"].tensors] == [0, 1] * 4
    assert run.history.loss.values.tolist() == [0, 1, 2, 3]


def test_the_rank_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask_rank() == 0
    monkeypatch.setenv("RANK", "3")
    assert ask_rank() == 3
    monkeypatch.setenv("RANK", "three")
    assert ask_rank() == 0
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    assert ask_rank() == 5


def test_a_rank_that_is_told_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = open_writer(tmp_path)
    first, second = make_steps([0, 1])
    add_step(writer, first)
    writer.flush()
    monkeypatch.setenv("RANK", "2")
    add_step(writer, second)
    writer.close()
    run = open_run(tmp_path)
    assert [rank.folder.name for rank in run.ranks] == ["rank00002"]
    assert run.ranks[0].facts["rank"] == 2
    assert run.history["a:output"].select(rank=2).steps.tolist() == [0, 1]
    assert len(run.history["a:output"].tensors) == 2


def test_a_second_writer_of_the_same_rank(tmp_path: Path) -> None:
    first, second = open_writer(tmp_path), open_writer(tmp_path)
    for writer, seed in ((first, 0), (second, 1)):
        writer.add_rows(make_steps([0], seed=seed)[0])
    first.flush()
    with pytest.warns(RetrogradWarning, match="Another process is rank 0"):
        second.flush()
    second.describe(second="must not be told")
    second.close()
    first.close()
    run = open_run(tmp_path)
    name = f"rank00000.p{os.getpid()}"
    assert [(rank.folder.name, rank.is_extra) for rank in run.ranks] == [("rank00000", False), (name, True)]
    assert run.history["a:output"].count.tolist() == [8]
    assert "second" not in run.manifest
    assert "1 by itself" in repr(run)
    assert open_run(tmp_path / name).status == "finished"
    alone = open_run(tmp_path / name).history
    assert alone["a:output"].mean.tolist() != run.history["a:output"].mean.tolist()


def test_two_that_took_each_others_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spawned processes know their rank only after they have begun to record."""
    first, second = open_writer(tmp_path), open_writer(tmp_path)
    monkeypatch.setenv("RANK", "1")
    first.flush()
    monkeypatch.setenv("RANK", "0")
    second.add_rows(make_steps([0])[0])
    second.describe(told="by rank 0")
    second.close()
    monkeypatch.setenv("RANK", "1")
    first.close()
    run = open_run(tmp_path)
    assert [rank.folder.name for rank in run.ranks] == ["rank00000", "rank00001"]
    assert run.manifest["told"] == "by rank 0"
    assert "resumed" not in run.manifest
    assert run.history["a:output"].select(rank=0).steps.tolist() == [0]


def test_another_rank_joins_a_run_that_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    early = open_writer(tmp_path)
    monkeypatch.setenv("RANK", "0")
    late = open_writer(tmp_path)
    late.close()
    monkeypatch.setenv("RANK", "1")
    early.close()
    assert [rank.folder.name for rank in open_run(tmp_path).ranks] == ["rank00000", "rank00001"]
    with pytest.raises(RunExistsError):
        RunWriter(tmp_path)


def test_joining_what_was_made_for_this_launch(tmp_path: Path) -> None:
    write_run(tmp_path)
    writer = open_writer(tmp_path, join=True)
    writer.add_rows(make_steps([0])[0])
    writer.close()  # without a warning: of a launch the last line tells
    assert len(open_run(tmp_path).ranks) == 2


def test_resuming_a_run_that_lives(tmp_path: Path) -> None:
    living = open_writer(tmp_path)
    living.add_rows(make_steps([0])[0])
    living.flush()
    second = open_writer(tmp_path, resume=True, step=0)
    second.close()
    living.close()
    assert open_run(tmp_path).history["a:output"].steps.tolist() == [0]


def test_ranks_without_a_common_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        writers.append(open_writer(tmp_path))
        writers[-1].add_rows(make_batch(Moment(rank, 0, 0), {0: torch.ones(2).numpy() * rank}))
        writers[-1].add_event(Event(Moment(rank, 0, 0), "loss", value=float(rank)))
        writers[-1].flush()
    history = open_run(tmp_path).history
    assert history.matrix("mean", SITES[:1]).values.tolist() == [[0.0, 1.0]]
    assert history.loss.values.tolist() == [0.0, 1.0]
    for rank, writer in enumerate(writers):
        monkeypatch.setenv("RANK", str(rank))
        writer.close()


def test_checking_a_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    check_vacant(tmp_path / "new")
    check_vacant(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_locks(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    lock, other = Lock(path), Lock(path)
    assert lock.acquire()
    assert is_locked(path)
    assert not other.acquire(0.0)
    lock.release()
    lock.release()
    assert not is_locked(path)
    assert other.acquire()
    other.release()
