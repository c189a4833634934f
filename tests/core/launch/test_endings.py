"""However a script ends: its exit code is its own, and what was recorded is there."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import SCRIPTS, run
from tests.core.launch.recorded import Command, Outcome, recorded, steps


@pytest.mark.parametrize(
    ("outcome", "code", "error"),
    [
        (Command("ends.py exit"), 3, ("SystemExit", "3")),
        (Command("ends.py raise"), 1, ("ValueError", "as planned")),
        (Command("ends.py caught"), 0, None),
    ],
    indirect=["outcome"],
    ids=str,
)
def test_an_end_of_which_python_knows(outcome: Outcome, code: int, error: tuple[str, str] | None) -> None:
    assert outcome.code == code
    assert outcome.moments() == steps(3)
    assert outcome.status() == ("finished" if error is None else "failed")
    assert len(outcome.words) == 2
    told = outcome.error()
    if error is None:
        assert told is None
        return
    assert told is not None
    assert (told["kind"], told["message"], told["in_backward"]) == (*error, False)
    assert "ends.py:" in told["lines"][-1]
    assert [event["text"] for event in outcome.events("error")] == [": ".join(error)]


def record(folder: Path, *words: str) -> tuple[int, list[str], dict[str, Any]]:
    """The exit code, what we said behind the first line, and what rank 0 tells of the exception that ended it."""
    script, *rest = words
    command = [str(SCRIPTS / script), *rest]
    code, output, errors = run([sys.executable, "-m", "retrograd", "run", "-o", "run", *command], folder)
    bare_code, bare_output, bare_errors = run([sys.executable, *command], folder)
    assert (code, output) == (bare_code, bare_output)
    assert bare_errors.splitlines()[-1] in errors.splitlines()
    said = [line for line in errors.splitlines() if line.startswith("retrograd: ")]
    return code, said[1:], json.loads((folder / "run/rank00000/rank.json").read_text())["error"]


def test_a_backward_pass_that_raises(tmp_path: Path) -> None:
    code, said, told = record(tmp_path, "fails_in_backward.py", "raise")
    assert code == 1
    assert said[0].startswith(
        "retrograd: a backward pass raised ArithmeticError in DampBackward, after net.head had its gradient; see"
    )
    assert said[0].endswith(f"retrograd trace {SCRIPTS / 'fails_in_backward.py'} raise")
    assert len(said) == 2
    assert (told["kind"], told["node"], told["module"]) == ("ArithmeticError", "DampBackward", "net.head")


def test_a_first_backward_pass_that_torch_refuses(tmp_path: Path) -> None:
    code, said, told = record(tmp_path, "blind.py")
    assert code == 1
    assert told["kind"] == "RuntimeError"
    assert said[-1].endswith("1 finding:")
    [found] = [
        json.loads(line) for line in (tmp_path / "run/findings.jsonl").read_text().splitlines() if "detector" in line
    ]
    assert "gradients were switched off" in found["message"]
    text = (SCRIPTS / "blind.py").read_text().splitlines()
    line = next(number for number, each in enumerate(text, 1) if "output = model" in each)
    assert found["line"] == f"{SCRIPTS / 'blind.py'}:{line}"


def test_a_program_that_dies_in_its_first_forward(tmp_path: Path) -> None:
    code, said, told = record(tmp_path, "dies_first.py")
    assert code == 1
    assert said[-1].endswith("1 finding:")
    [found] = [json.loads(line) for line in (tmp_path / "run/findings.jsonl").read_text().splitlines()]
    assert found["detector"] == "failed"
    assert told["message"] in found["message"]


def test_one_that_would_not_have_trained_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "retrograd", "run", "-o", "run", str(SCRIPTS / "dies_first.py"), "infer"]
    assert run(command, tmp_path)[0] == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("script", "in_backward"), [("fails_in_backward.py", True), ("ends.py", False)])
def test_an_interrupt(script: str, in_backward: bool, tmp_path: Path) -> None:
    code, said, told = record(tmp_path, script, "interrupt")
    assert code == -signal.SIGINT
    assert len(said) == 1  # it needs no explanation
    assert (told["kind"], told["in_backward"]) == ("KeyboardInterrupt", in_backward)


def test_what_ended_a_process_below_is_told_of_too(tmp_path: Path) -> None:
    code, said, told = record(tmp_path, "spawned_fails.py")
    assert code == 1
    assert "in DampBackward" in said[0]
    assert told["kind"] == "ArithmeticError"


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
    assert f"but {lost['rows']} rows were lost" in outcome.words[-1]
    assert outcome.events("loss")
    assert outcome.warnings == 2
