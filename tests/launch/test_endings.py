"""However a script ends: its exit code is its own, and what was recorded is there."""

from __future__ import annotations

import signal

import pytest

from tests.launch.conftest import Record


@pytest.mark.parametrize(("how", "code", "status"), [("exit", 3, "finished"), ("raise", 1, "failed")])
def test_an_end_of_which_python_knows(record: Record, how: str, code: int, status: str) -> None:
    outcome = record("ends.py", how)
    assert outcome.code == code
    assert outcome.moments() == [(step, 0) for step in range(3)]
    assert outcome.status() == status
    assert len(outcome.words) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("_exit", 4), ("SIGTERM", -signal.SIGTERM), ("SIGKILL", -signal.SIGKILL)])
def test_a_sudden_end(record: Record, how: str, code: int) -> None:
    outcome = record("ends.py", how)
    assert outcome.code == code
    assert outcome.moments()[:2] == [(0, 0), (1, 0)]  # the last step is written when another one follows it
    assert outcome.status() == "running"
    assert len(outcome.words) == 1


def test_a_script_without_torch(record: Record) -> None:
    outcome = record("no_torch.py", "--lr", "0.1")
    assert outcome.output == "nothing to see ['--lr', '0.1']\n"
    assert outcome.words[1:] == ["retrograd: nothing was recorded: torch was not imported"]
    assert not outcome.run.exists()


def test_a_script_that_trains_nothing(record: Record) -> None:
    outcome = record("untrained.py")
    assert outcome.words[1:] == ["retrograd: nothing was recorded: no backward pass was seen"]
    assert not outcome.run.exists()
