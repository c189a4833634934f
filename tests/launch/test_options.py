"""What ``retrograd run`` can be asked for, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.conftest import ENVIRONMENT, SCRIPTS, Record

SCRIPT = str(SCRIPTS / "plain_loop.py")


def launch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "retrograd.cli", "run", *words]
    return subprocess.run(line, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def test_sites_steps_and_tensors_that_were_asked_for(record: Record) -> None:
    options = ("--sites", "head:*.grad", "!*:bias*", "--every", "2", "--tensors", "self:output", "--no-histogram")
    outcome = record("plain_loop.py", options=options)
    rows = outcome.rows()
    assert {(row["step"], row["site"]) for row in rows if row["phase"] == "train"} == {
        (step, site) for step in (0, 2) for site in ("head:output.grad", "head:weight.grad")
    }
    assert not any(row["bins"] for row in rows)
    assert list((outcome.run / "rank00000" / "tensors").glob("*.safetensors"))


def test_a_module(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "retrograd.cli", "run", "-o", str(tmp_path / "run"), "-m", "plain_loop"]
    done = subprocess.run(line, cwd=SCRIPTS, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 5
    assert (tmp_path / "run" / "manifest.json").is_file()


def test_a_pattern_that_matches_nothing_ends_the_script_before_it_trains(tmp_path: Path) -> None:
    done = launch(tmp_path, "--sites", "haed:output", "-o", "run", SCRIPT)
    assert done.returncode == 2
    assert not done.stdout
    assert "[no-such-site]" in done.stderr
    assert "head:output" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run_is_refused_unless_it_is_to_go_on(record: Record) -> None:
    outcome = record("plain_loop.py")
    again = launch(outcome.run.parent, "-o", "run", SCRIPT)
    assert again.returncode == 2
    assert not again.stdout
    assert "[run-exists]" in again.stderr
    resumed = launch(outcome.run.parent, "-o", "run", "--resume", SCRIPT)
    assert resumed.returncode == 0
    assert outcome.moments() == [(step, 0) for step in (0, 1, 2, 3, 5, 6, 7, 8)]  # step 4 is the evaluation's


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = launch(tmp_path, "-o", "file/run", SCRIPT)
    assert done.returncode == 2
    assert not done.stdout
    assert "[run-not-writable]" in done.stderr


def test_training_goes_on_where_the_folder_cannot_be_written_any_more(record: Record) -> None:
    outcome = record("takes_the_folder.py")
    assert outcome.output.endswith("mine\n")
    assert len(outcome.words) == 3
    assert "cannot be written" in outcome.words[1]
    assert outcome.words[2].startswith("retrograd: nothing was recorded: ")


@pytest.mark.parametrize("filter_", ["error", "ignore"])
def test_warning_filters_of_the_script_are_its_own(record: Record, filter_: str) -> None:
    outcome = record("compiled.py", "model", environment={"PYTHONWARNINGS": filter_})
    assert outcome.code == 0
