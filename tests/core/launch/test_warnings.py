"""What a script and its libraries warn of is printed as often as without us, and by the same lines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import warm
from tests.commands import ENVIRONMENT, SCRIPTS, Stage
from tests.core.launch.recorded import Command

SCRIPT = str(SCRIPTS / "deprecations.py")


@pytest.mark.parametrize("options", ["", "--inventory 2"])
def test_a_recording_has_nothing_printed_twice(stage: Stage, options: str) -> None:
    """What stands on stderr is compared with a bare run."""
    outcome = stage.outcome(Command("deprecations.py", options))
    assert outcome.code == 0


def test_what_torch_warns_of_is_told_of_the_programs_lines(stage: Stage) -> None:
    """What stands on stderr is compared with a bare run, which names both lines once."""
    outcome = stage.outcome(Command("torch_warns.py"))
    assert outcome.code == 0


@pytest.mark.parametrize("command", ["trace", "inventory"])
def test_nor_has_a_trace_or_an_inventory(command: str, tmp_path: Path) -> None:
    ours = [sys.executable, "-m", "retrograd", command, "-o", "out", SCRIPT]
    result = warm.run(ours, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=150, check=False)
    assert result.stderr.count("UserWarning: an old loop") == 1
    assert result.stderr.count("FutureWarning: an old backward") == 1


def test_a_filter_for_the_programs_module_makes_an_error_as_without_us(stage: Stage) -> None:
    """What stands on stdout is compared with a bare run, in which each pass raises."""
    outcome = stage.outcome(Command("warns_at_its_line.py"))
    assert outcome.code == 0
    assert outcome.output.count("Full backward hook is firing") == 3
