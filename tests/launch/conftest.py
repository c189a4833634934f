"""Runs a script twice, bare and through the real command, and compares the two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.recorded import Outcome

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "PYTHONPATH": str(ROOT / "src"),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}

LINE = re.compile(r"^(retrograd: .*)\n", re.MULTILINE)
WARNING = re.compile(r"^.* RetrogradWarning: .*\n  .*\n", re.MULTILINE)

Record = Callable[..., Outcome]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Record a command: ``record("gan.py")``, ``record("torchrun", "ddp.py", options=["--every", "2"])``."""

    def run(*command: str, options: tuple[str, ...] = (), environment: dict[str, str] | None = None) -> Outcome:
        words = [str(SCRIPTS / word) if word.endswith(".py") else word for word in command]
        bare = [sys.executable, *words] if words[0].endswith(".py") else words
        ours = [sys.executable, "-m", "retrograd.cli", "run", "-o", "run", *options, *words]
        folders = [tmp_path / "bare", tmp_path / "recorded"]
        processes = []
        for folder, line in zip(folders, (bare, ours), strict=True):
            folder.mkdir()
            processes.append(
                subprocess.Popen(
                    line,
                    cwd=folder,
                    env={**ENVIRONMENT, **(environment or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        (bare_output, bare_errors), (output, errors) = (process.communicate(timeout=240) for process in processes)
        assert processes[1].returncode == processes[0].returncode, errors
        assert output == bare_output, errors
        rest, warnings = WARNING.subn("", errors)
        said = LINE.findall(rest)
        assert LINE.sub("", rest) == bare_errors
        return Outcome(processes[1].returncode, output, said, warnings, folders[1] / "run")

    return run
