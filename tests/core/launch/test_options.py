"""What ``retrograd run`` can be asked for, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.commands import SCRIPTS, run
from tests.core.launch.recorded import Command, Outcome, recorded, steps

SCRIPT = str(SCRIPTS / "plain_loop.py")


def launch(folder: Path, *words: str) -> tuple[int, str, str]:
    return run([sys.executable, "-m", "retrograd", "run", *words], folder)


@recorded(
    "plain_loop.py",
    options="--sites 'head:[ow]*.grad' 'body*' '!body.*' --every 2 --tensors self:output --no-histogram",
)
def test_sites_steps_and_tensors_that_were_asked_for(outcome: Outcome) -> None:
    rows = outcome.rows()
    assert {(row["step"], row["site"]) for row in rows if row["phase"] == "train"} == {
        (step, site)
        for step in (0, 2)
        for site in ("head:output.grad", "head:weight.grad", "body:output", "body:output.grad")
    }
    assert not any(row["bins"] for row in rows)
    assert list((outcome.run / "rank00000" / "tensors").glob("*.safetensors"))


def test_a_module(tmp_path: Path) -> None:
    code, output, _ = launch(SCRIPTS, "-o", str(tmp_path / "run"), "-m", "plain_loop")
    assert code == 0
    assert output.count("\n") == 5
    assert (tmp_path / "run" / "manifest.json").is_file()


def test_a_pattern_that_matches_nothing_ends_the_script_before_it_trains(tmp_path: Path) -> None:
    code, output, errors = launch(tmp_path, "--sites", "haed:output", "-o", "run", SCRIPT)
    assert code == 2
    assert not output
    assert "[no-such-site]" in errors
    assert "head:output" in errors
    assert not (tmp_path / "run").exists()


@recorded("plain_loop.py", options="--resume")
def test_a_folder_that_holds_a_run_is_refused_unless_it_is_to_go_on(outcome: Outcome) -> None:
    folder = outcome.run.parent
    code, output, errors = launch(folder, "-o", "run", SCRIPT)
    assert code == 2
    assert not output
    assert "[run-exists]" in errors
    assert outcome.moments() == steps(4)
    code, *_ = launch(folder, "-o", "run", "--resume", SCRIPT)
    assert code == 0
    assert [step for step, _ in outcome.moments()] == [0, 1, 2, 3, 5, 6, 7, 8]  # step 4 is the evaluation's


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, output, errors = launch(tmp_path, "-o", "file/run", SCRIPT)
    assert code == 2
    assert not output
    assert "[run-not-writable]" in errors


@recorded("takes_the_folder.py")
def test_training_goes_on_where_the_folder_cannot_be_written_any_more(outcome: Outcome) -> None:
    assert outcome.output.endswith("mine\n")
    assert len(outcome.words) == 3
    assert "cannot be written" in outcome.words[1]
    assert outcome.words[2].startswith("retrograd: nothing was recorded: ")


@pytest.mark.parametrize("outcome", [Command("compiled.py model", filters="error")], indirect=True)
def test_warnings_that_the_script_takes_for_errors_are_none_of_ours(outcome: Outcome) -> None:
    assert outcome.code == 0
