"""Scripts that start other processes: those that train record themselves, the others are silent."""

from __future__ import annotations

import pytest

from tests.launch.conftest import Record
from tests.launch.recorded import outputs, parameters

PATHS = ("body.0", "body.1", "body", "head", "self")
NET = outputs(*PATHS) | parameters("body.0", "head")


def test_a_child_that_trains(record: Record) -> None:
    outcome = record("child_process.py")
    assert outcome.sites() == NET
    assert outcome.moments() == [(step, 0) for step in range(4)]
    assert outcome.words[1:] == ["retrograd: recorded 1 process; see it with: retrograd report run"]


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_data_loader_are_silent(record: Record, context: str) -> None:
    outcome = record("loader_workers.py", context)
    assert outcome.ranks() == ["rank00000"]
    assert outcome.sites() == NET
    assert outcome.moments() == [(step, 0) for step in range(6)]
    assert len(outcome.words) == 2


@pytest.mark.slow
def test_spawned_children_that_train(record: Record) -> None:
    outcome = record("spawned.py")
    assert outcome.ranks() == ["rank00000", "rank00001"]
    for rank in outcome.ranks():
        assert outcome.sites(rank) == NET
        assert outcome.moments(rank=rank) == [(step, 0) for step in range(3)]
        assert outcome.status(rank) == "finished"
    assert outcome.words[1:] == ["retrograd: recorded 2 processes; see it with: retrograd report run"]


def test_forked_children_that_train_on(record: Record) -> None:
    outcome = record("forked.py")
    parent, *children = outcome.ranks()
    assert outcome.moments(rank=parent) == [(step, 0) for step in range(3)]
    trained = sorted(len(outcome.moments(rank=child)) for child in children)
    assert trained == [3, 4]
    assert all(outcome.sites(rank) == NET for rank in outcome.ranks())
    assert {outcome.status(rank) for rank in outcome.ranks()} == {"finished"}
    assert outcome.warnings == 2  # that each child writes beside its parent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "seen"),
    [pytest.param("ddp.py", NET, id="DDP"), pytest.param("fsdp.py", outputs(*PATHS), id="FSDP2")],
)
def test_every_rank_of_torchrun(record: Record, script: str, seen: set[str]) -> None:
    outcome = record("torchrun", "--nproc-per-node", "2", script)
    assert outcome.ranks() == ["rank00000", "rank00001"]
    for rank in outcome.ranks():
        assert outcome.sites(rank) == seen
        assert outcome.moments(rank=rank) == [(step, 0) for step in range(3)]
        assert outcome.status(rank) == "finished"
    assert {entry["site"] for entry in outcome.manifest()["not_recorded"]} == NET - seen


def test_an_isolated_child_is_not_recorded(record: Record) -> None:
    outcome = record("isolated_child.py")
    assert outcome.ranks() == []
    assert outcome.words[1:] == ["retrograd: nothing was recorded: torch was not imported"]
