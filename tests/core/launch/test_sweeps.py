"""A script that trains models one after the other frees each as it does bare, also under the commands that trace it."""

from __future__ import annotations

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
