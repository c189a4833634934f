"""The command of the user that is run for ``retrograd run``, ``explain``, ``trace`` and their like."""

from __future__ import annotations

import difflib
import shutil
import sys
import time
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from retrograd.errors import LaunchError


def resolve_command(command: Sequence[str], verb: str = "run") -> list[str]:
    """Find what to execute: scripts and modules by this Python, anything else as it is.

    Args:
        command: what the user typed.
        verb: behind which command of ours, for messages.

    Raises:
        LaunchError: if there is no such script, module or program.
    """
    if not command:
        raise LaunchError(f"No command was given to {verb}.", repair=f"retrograd {verb} train.py [ARGS]")
    first = command[0]
    if first == "-m":
        _check_module(command[1:2], verb)
    elif first.endswith(".py") or not (program := shutil.which(first)):
        _check_script(Path(first))
    else:
        return [program, *command[1:]]
    return [sys.executable, *command]


def choose_folder(command: Sequence[str], parent: str = "runs") -> str:
    """A new folder for what becomes of this command: ``runs/<script>-<date>-<time>``."""
    scripts = [word for word in command if word.endswith(".py")]
    name = command[1] if command[0] == "-m" else Path([*scripts, command[0]][0]).stem
    wish = f"{parent}/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = wish, 1
    while Path(folder).exists():
        number += 1
        folder = f"{wish}-{number}"
    return folder


def _check_script(script: Path) -> None:
    if script.is_file() or Path(script, "__main__.py").is_file():
        return
    files = [str(path) for path in script.parent.glob("*.py")]
    near = difflib.get_close_matches(str(script), files, n=1)
    raise LaunchError(
        f"The script {str(script)!r} does not exist.",
        repair=f"the nearest is {near[0]!r}." if near else "give the path of a Python script, or a program on PATH.",
    )


def _check_module(name: Sequence[str], verb: str) -> None:
    if not name:
        raise LaunchError("No module was given after -m.", repair=f"retrograd {verb} -m package.module [ARGS]")
    top = name[0].partition(".")[0]
    if top not in sys.builtin_module_names and PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) is None:
        raise LaunchError(
            f"The module {top!r} cannot be found.", repair="install it, or run from the folder that holds it."
        )
