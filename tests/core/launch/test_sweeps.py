"""Scripts that train many models: each is freed as it is bare, and those that begin at once have a folder each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.commands import ENVIRONMENT, SCRIPTS

SCRIPT = str(SCRIPTS / "sweep.py")


@pytest.mark.parametrize("command", ["trace -o out", "inventory -o out", "run -o out --inventory 3"])
def test_models_that_the_program_has_dropped_are_freed(command: str, tmp_path: Path) -> None:
    ours = [sys.executable, "-m", "retrograd", *command.split(), SCRIPT]
    result = warm.run(ours, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=150, check=False)
    counts = [line for line in result.stdout.splitlines() if "." not in line]
    assert counts[:9] == ["0"] * 9, result.stderr


def test_commands_that_begin_in_one_second_have_a_folder_each(tmp_path: Path) -> None:
    ours = [sys.executable, "-m", "retrograd", "run", "-q", str(SCRIPTS / "plain_loop.py")]
    processes = [
        warm.Popen(ours, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.DEVNULL, start_new_session=True)
        for _ in range(3)
    ]
    assert [process.wait(150) for process in processes] == [0] * 3
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 3
    assert [sorted(path.name for path in run.glob("rank*")) for run in runs] == [["rank00000"]] * 3


def test_a_folder_that_was_made_for_its_name_alone_does_not_stay(tmp_path: Path) -> None:
    ours = [sys.executable, "-m", "retrograd", "run", str(SCRIPTS / "no_torch.py")]
    result = warm.run(ours, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=150, check=False)
    assert "torch was not imported" in result.stderr
    assert not list(tmp_path.iterdir())
