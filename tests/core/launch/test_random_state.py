"""A script that seeds before it loads torch draws the same numbers under each of our commands as without them.

All begin in a new interpreter, as a user's do.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from retrograd.core.cli.commands import COMMANDS as OURS
from tests.commands import ENVIRONMENT, SCRIPTS, run

COMMANDS = {
    "run": "--inventory 1 --tensors *:output",
    "trace": "--live --norms --memory",
    "inventory": "--timed --pass 0",
    "debug": "",
    "explain": "",
}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    script = [sys.executable, str(SCRIPTS / "seeds_early.py")]
    code, output, _ = run(script, tmp_path_factory.mktemp("bare"), ENVIRONMENT, subprocess.Popen)
    assert code == 0
    return output


@pytest.mark.parametrize("verb", COMMANDS)
def test_the_same_numbers_are_drawn(verb: str, bare: str, tmp_path: Path) -> None:
    options = COMMANDS[verb].split() + ([] if verb == "debug" else ["-o", "out"])
    words = [sys.executable, "-m", "retrograd", verb, *options, str(SCRIPTS / "seeds_early.py")]
    code, output, errors = run(words, tmp_path, ENVIRONMENT, subprocess.Popen)
    is_followed = verb == "explain"  # what was found stands behind what the script has printed
    assert (code, output[: len(bare)] if is_followed else output) == (0, bare), errors


def test_every_command_that_runs_a_script_is_tried() -> None:
    assert set(COMMANDS) == {each.name for each in OURS if each.runs}
