"""Runs scripts twice, bare and through the real command, and compares the two.

They begin with torch loaded (:mod:`tests.warm`), but for a few, which begin as a user's do. All that a file wants
begin at once, two at a time.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import warm
from tests.core.launch.recorded import Command, Outcome, uncounted

HERE = Path(__file__).parent / "core" / "launch"
SCRIPTS = HERE / "scripts"
ROOT = HERE.parents[2]
ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "PYTHONPATH": str(ROOT / "src"),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
COLD = (Command("plain_loop.py"), Command("torchrun --standalone --nproc-per-node 2 ddp.py"))
"""Commands that begin in a new interpreter, recorded and bare."""
ABORTED = "terminate called without an active exception"
LINE = re.compile(r"^(retrograd: .*(?:\n  (?:(?:critical|warning|note) |more:) ?.*)*)\n", re.MULTILINE)
WARNING = re.compile(r"^.* RetrogradWarning: .*\n(?:  .*\n)?", re.MULTILINE)  # without a line where Python is ending


class Stage:
    """Where commands are run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._futures: dict[Command, Future[Outcome]] = {}
        self._pool = ThreadPoolExecutor(2)

    def begin(self, command: Command) -> None:
        """Have this run soon."""
        if command not in self._futures:
            self._futures[command] = self._pool.submit(self._compare, command, len(self._futures))

    def outcome(self, command: Command) -> Outcome:
        """Wait for what came of it."""
        self.begin(command)
        return self._futures[command].result()

    def close(self) -> None:
        """Begin nothing more, and end."""
        self._pool.shutdown(cancel_futures=True)

    def _compare(self, command: Command, number: int) -> Outcome:
        folders = [self._folder / f"{number}-{kind}" for kind in ("bare", "recorded")]
        for folder in folders:
            folder.mkdir()
        words = [str(SCRIPTS / word) if word.endswith(".py") else word for word in shlex.split(command.line)]
        environment = {**ENVIRONMENT, "PYTHONWARNINGS": command.filters}
        bare = [sys.executable, *words] if words[0].endswith(".py") else words
        ours = [sys.executable, "-m", "retrograd", "run", "-o", "run", *shlex.split(command.options), *words]
        start = subprocess.Popen if command in COLD else warm.Popen
        expected = run(bare, folders[0], environment, start)
        code, output, errors = run(ours, folders[1], environment, start)
        rest, warnings = WARNING.subn("", errors)
        assert (code, output, LINE.sub("", rest)) == expected, errors
        return Outcome(code, output, LINE.findall(uncounted(rest)), warnings, folders[1] / "run")


def run(
    words: list[str],
    folder: Path,
    environment: dict[str, str] = ENVIRONMENT,
    start: type[subprocess.Popen[str]] = warm.Popen,
) -> tuple[int, str, str]:
    """Exit code, output and errors of a command.

    One process in some fifty of torchrun's that has ended its process group is aborted while Python ends, with or
    without us: the command is run again.
    """
    for _ in range(3):
        code, output, errors = run_once(words, folder, environment, start)
        if ABORTED not in errors:
            break
        shutil.rmtree(folder)
        folder.mkdir()
    return code, output, errors


def run_once(
    words: list[str], folder: Path, environment: dict[str, str], start: type[subprocess.Popen[str]]
) -> tuple[int, str, str]:
    """The same, however it ends; one that hangs is killed with all that it has started."""
    process = start(
        words,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        errors += f"\nkilled, since it hung: {shlex.join(words)}\n"
    return process.returncode, output, errors


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("launch"))
    yield stage
    stage.close()


@pytest.fixture
def outcome(request: pytest.FixtureRequest, stage: Stage) -> Outcome:
    """What the command of the decorator :func:`recorded` did; those of the same file begin now, too."""
    for item in request.session.items:
        command = item.callspec.params.get("outcome") if hasattr(item, "callspec") else None
        if item.path == request.path and isinstance(command, Command):
            stage.begin(command)
    return stage.outcome(request.param)
