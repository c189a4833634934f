"""``retrograd run --inventory``: what autograd keeps, beside what is recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrograd.core.cli import main
from retrograd.memory.inventory.inventory import Inventory
from tests.core.launch.recorded import Outcome, recorded, steps


def load(outcome: Outcome, rank: str = "rank00000") -> Inventory:
    return Inventory.load(outcome.run / rank / "inventory.parquet")


@recorded("plain_loop.py", options="--inventory 1")
def test_both_are_in_one_folder(outcome: Outcome) -> None:
    """Bare, the script does the same: the fixture compares."""
    assert outcome.code == 0
    assert outcome.moments() == steps(4)
    assert outcome.ranks() == ["rank00000"]
    inventory = load(outcome)
    assert inventory.passes == 1
    rows = {(row["module"], row["slot"]): row for row in inventory.table.to_pylist()}
    assert rows["body.1", "result"]["resident"] == 8 * 8 * 4
    assert len(outcome.words) == 2


@recorded("plain_loop.py", options="--inventory 0 --every 3")
def test_the_first_pass(outcome: Outcome) -> None:
    assert outcome.moments() == [(0, 0), (3, 0)]
    assert load(outcome).passes == 1


@recorded("plain_loop.py", options="--inventory 3")
def test_the_last_pass(outcome: Outcome) -> None:
    """No module is called after it in training mode that could end it before the process does."""
    assert load(outcome).passes == 1


@recorded("plain_loop.py", options="--inventory 9")
def test_a_pass_that_is_never_made(outcome: Outcome) -> None:
    assert outcome.moments() == steps(4)
    assert not (outcome.run / "rank00000" / "inventory.parquet").exists()
    assert outcome.words[1] == (
        "retrograd: no inventory was taken: 4 backward passes ran, and --inventory 9 counts from 0"
    )
    assert outcome.words[2].startswith("retrograd: recorded 4 steps")


@pytest.mark.slow
@recorded("torchrun --standalone --nproc-per-node 2 ddp.py", options="--inventory 1")
def test_two_ranks(outcome: Outcome) -> None:
    assert len(load(outcome)) == len(load(outcome, "rank00001")) > 0
    assert not any("no inventory" in line for line in outcome.words)


def test_what_cannot_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["run", "--inventory", "-1", "train.py"]) == 2
    assert "--inventory -1 is before the first" in capsys.readouterr().err
