"""However a script ends: its exit code is its own, and what was recorded is there."""

from __future__ import annotations

import signal

import pytest

from tests.launch.recorded import Command, Outcome, recorded, steps


@pytest.mark.parametrize(
    ("outcome", "code", "status"),
    [(Command("ends.py exit"), 3, "finished"), (Command("ends.py raise"), 1, "failed")],
    indirect=["outcome"],
    ids=str,
)
def test_an_end_of_which_python_knows(outcome: Outcome, code: int, status: str) -> None:
    assert outcome.code == code
    assert outcome.moments() == steps(3)
    assert outcome.status() == status
    assert len(outcome.words) == 2


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Command("ends.py _exit"), 4),
        (Command("ends.py SIGTERM"), -signal.SIGTERM),
        (Command("ends.py SIGKILL"), -signal.SIGKILL),
    ],
    indirect=["outcome"],
    ids=str,
)
def test_a_sudden_end(outcome: Outcome, code: int) -> None:
    assert outcome.code == code
    assert outcome.moments()[:2] == steps(2)  # the last step is written when another one follows it
    assert outcome.status() == "running"
    assert len(outcome.words) == 1


@recorded("no_torch.py --lr 0.1")
def test_a_script_without_torch(outcome: Outcome) -> None:
    assert outcome.output == "nothing to see ['--lr', '0.1']\n"
    assert outcome.words[1:] == ["retrograd: nothing was recorded: torch was not imported"]
    assert not outcome.run.exists()


@recorded("untrained.py")
def test_a_script_that_trains_nothing(outcome: Outcome) -> None:
    assert outcome.words[1:] == ["retrograd: nothing was recorded: no backward pass was seen"]
    assert not outcome.run.exists()


@recorded("prlimit --fsize=8192 python plain_loop.py")
def test_a_disk_that_does_not_take_all(outcome: Outcome) -> None:
    lost = outcome.manifest()["lost"]
    assert lost["rows"] > 0
    assert f"but {lost['rows']} rows, 0 events and 0 tensors were lost" in outcome.words[-1]
    assert outcome.events("loss")
    assert outcome.warnings == 2
