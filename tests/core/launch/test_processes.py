"""Scripts that start other processes: those that train record themselves, the others are silent."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from retrograd.core.runs.reader import open_run
from tests.commands import SCRIPTS, run
from tests.core.launch.recorded import HEALTHY, Outcome, outputs, parameters, recorded, steps

PATHS = ("body.0", "body.1", "body", "head", "self")
NET = outputs(*PATHS) | parameters("body.0", "head")


@recorded("child_process.py")
def test_a_child_that_trains(outcome: Outcome) -> None:
    assert outcome.sites() == NET
    assert outcome.moments() == steps(4)
    assert outcome.words[1:] == [f"retrograd: recorded in 1 process; {HEALTHY}"]


@pytest.mark.slow
@recorded("loader_workers.py fork", "loader_workers.py spawn")
def test_workers_of_a_data_loader_are_silent(outcome: Outcome) -> None:
    assert outcome.ranks() == ["rank00000"]
    assert outcome.sites() == NET
    assert outcome.moments() == steps(6)
    assert len(outcome.words) == 2


@pytest.mark.slow
@recorded("spawned.py")
def test_spawned_children_that_train(outcome: Outcome) -> None:
    assert outcome.ranks() == ["rank00000", "rank00001"]
    for rank in outcome.ranks():
        assert outcome.sites(rank) == NET
        assert outcome.moments(rank=rank) == steps(3)
        assert outcome.status(rank) == "finished"
    assert outcome.words[1:] == [f"retrograd: recorded in 2 processes; {HEALTHY}"]


@recorded("forked.py")
def test_forked_children_that_train_on(outcome: Outcome) -> None:
    parent, *children = outcome.ranks()
    assert outcome.moments(rank=parent) == steps(3)
    assert sorted(len(outcome.moments(rank=child)) for child in children) == [3, 4]
    assert all(outcome.sites(rank) == NET for rank in outcome.ranks())
    assert {outcome.status(rank) for rank in outcome.ranks()} == {"finished"}
    assert outcome.warnings == 0  # the last line tells of the children
    assert ", and 2 more processes; no findings; " in outcome.words[-1]


@pytest.mark.slow
def test_what_is_wrong_with_a_child_is_said_and_its_standard_error_is_as_it_is(tmp_path: Path) -> None:
    script = str(SCRIPTS / "ill_child.py")
    bare = run([sys.executable, script], tmp_path)
    code, output, errors = run([sys.executable, "-m", "retrograd", "run", "-o", "run", script], tmp_path)
    assert (code, output) == bare[:2]
    _, child = sorted(path.name for path in (tmp_path / "run").glob("rank*"))
    assert open_run(tmp_path / "run" / child).status == "finished"
    assert ", and 1 more process; no findings in rank00000; " in errors
    assert f"\n  1 finding in {child}, a process by itself:\n  critical  Gradients are never cleared: " in errors
    assert f"\n  more: retrograd explain run/{child}\n" in errors


@pytest.mark.slow
@recorded("torchrun --standalone --nproc-per-node 2 ddp.py", "torchrun --standalone --nproc-per-node 2 fsdp.py")
def test_every_rank_of_torchrun(outcome: Outcome) -> None:
    assert outcome.ranks() == ["rank00000", "rank00001"]
    for rank in outcome.ranks():
        assert outcome.sites(rank) == NET
        assert outcome.moments(rank=rank) == steps(3)
        assert outcome.status(rank) == "finished"
    assert not outcome.manifest()["not_recorded"]
    history = open_run(outcome.run).history
    assert history["body.0:weight.grad"].count.tolist() == history["body.0:weight.update"].count.tolist() == [32] * 3
    assert history["body.0:output"].count.tolist() == [2 * 64] * 3
    assert not history.disagreements


@recorded("isolated_child.py")
def test_an_isolated_child_is_not_recorded(outcome: Outcome) -> None:
    assert outcome.ranks() == []
    assert outcome.words[1:] == ["retrograd: nothing was recorded: torch was not imported"]


@pytest.mark.slow
@recorded("loader_gradients.py fork", "loader_gradients.py spawn")
def test_what_workers_of_a_data_loader_run_backward_is_no_training(outcome: Outcome) -> None:
    assert outcome.ranks() == ["rank00000"]
    assert outcome.sites() == NET
    assert outcome.moments() == steps(6)
    assert outcome.warnings == 0
    assert len(outcome.words) == 2


@pytest.mark.slow
@pytest.mark.parametrize("command", ["trace", "inventory"])
def test_what_workers_of_a_data_loader_run_backward_is_not_followed(tmp_path: Path, command: str) -> None:
    words = [sys.executable, "-m", "retrograd", command, "-o", "out", str(SCRIPTS / "loader_gradients.py"), "spawn"]
    code, _, errors = run(words, tmp_path)
    assert code == 0, errors
    assert [path.name for path in (tmp_path / "out").iterdir() if path.is_dir()] == ["rank00000"]
    assert "more process" not in errors


@pytest.mark.slow
@recorded("torchrun --standalone --nproc-per-node 2 ddp.py", "spawned.py", options="--ranks 1")
def test_the_ranks_that_were_chosen(outcome: Outcome) -> None:
    """Under torchrun a process knows its rank from the start; one that the program starts by itself does not."""
    assert outcome.ranks() == ["rank00001"]
    assert outcome.sites("rank00001") == NET
    assert outcome.moments(rank="rank00001") == steps(3)
    assert outcome.manifest()["ranks"] == {"every": 0, "listed": [1]}
    assert outcome.words[1:] == [f"retrograd: recorded in 1 process; {HEALTHY}"]


@recorded("late_rank.py", options="--ranks 1")
def test_a_rank_that_is_known_after_the_first_forward(outcome: Outcome) -> None:
    assert outcome.ranks() == ["rank00001"]
    assert outcome.sites("rank00001") == NET
    assert {step for step, _ in outcome.moments(rank="rank00001")} == {0, 1, 2}
    assert outcome.words[1:] == [f"retrograd: recorded 3 steps at {len(NET)} sites; {HEALTHY}"]


@recorded("late_rank.py", options="--ranks 0")
def test_a_rank_that_turns_out_not_to_be_chosen(outcome: Outcome) -> None:
    assert outcome.ranks() == []
    assert outcome.words[1:] == ["retrograd: nothing was recorded: rank 1 is not among --ranks 0"]


@recorded("plain_loop.py", options="--ranks 1")
def test_of_a_single_process_that_was_not_chosen_it_is_said(outcome: Outcome) -> None:
    assert outcome.ranks() == []
    assert outcome.words[1:] == ["retrograd: nothing was recorded: rank 0 is not among --ranks 1"]
