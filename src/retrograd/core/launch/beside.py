"""Processes of ours beside the program that is recorded. Loads within a moment."""

from __future__ import annotations

import os
import subprocess
import sys

from retrograd.core.errors import LaunchError
from retrograd.core.launch.start import make_own_environment

_POLITENESS = 10
"""How much lower the priority of such a process is than the program's."""

_BEGIN = "import os; os.fork() and os._exit(0); os.nice({}); from {} import main; main()"
"""It forks before it loads anything: libraries with threads of their own may hang in a fork."""


def start_beside(module: str, *words: str, is_heard: bool = False) -> str:
    """Start a process that outlives this one, and is none of its children: the program may wait for all that it has.

    Args:
        module: its function ``main`` is called. It says a line on its standard output, and then nothing more.
        words: the arguments of the process.
        is_heard: it shares our standard error. Whoever reads that then waits for the end of the process.

    Returns:
        That line.

    Raises:
        LaunchError: it did not say one.
    """
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _BEGIN.format(_POLITENESS, module), *words],
        env=make_own_environment(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if is_heard else subprocess.DEVNULL,
        encoding="utf-8",
        start_new_session=True,
    ) as starting:
        line = starting.stdout.readline().strip() if starting.stdout else ""
    if not line:
        raise LaunchError(
            "The process beside the program did not start.", repair="leave out --live, --open and --mirror."
        )
    return line


def answer(line: str) -> None:
    """Print the line that is waited for, and nothing more on standard output."""
    print(line, flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def is_alive(process: int) -> bool:
    """Return whether there is a process of this number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        pass
    return True
