"""Becoming the command, in an environment in which every Python process below does what was asked for."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NoReturn, Protocol

from retrograd.errors import LaunchError
from retrograd.launch.closing import say
from retrograd.launch.interpreter import find_obstacle

BOOTSTRAP = Path(__file__).parent / "bootstrap"
"""Folder of the ``sitecustomize`` that every Python process below finds first."""


OURS = "RETROGRAD_"
"""How the names of our environment variables begin."""


class Requested(Protocol):
    """What a command of ours was asked for.

    Attributes:
        variable: name of the environment variable that holds it.
    """

    variable: ClassVar[str]

    def write(self) -> str:
        """The text of that variable."""


def make_environment(request: Requested, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which every Python process does as requested, and nothing else that we were asked before."""
    hidden = environment.get("PYTHONPATH")
    paths = [path for path in hidden.split(os.pathsep) if path != str(BOOTSTRAP)] if hidden else []
    theirs = {name: value for name, value in environment.items() if not name.startswith(OURS)}
    return {**theirs, request.variable: request.write(), "PYTHONPATH": os.pathsep.join([str(BOOTSTRAP), *paths])}


def start(command: Sequence[str], request: Requested, promise: str) -> NoReturn:
    """Say what will be done, and become the command; or say why it will not be done, and become it all the same.

    Args:
        command: what to execute.
        request: what its processes are to do.
        promise: what is said; nothing where it is empty.

    Raises:
        LaunchError: if the system refuses to execute it.
    """
    environment = make_environment(request, os.environ)
    if words := find_obstacle(command, environment) or promise:
        say(words)
    replace_process(command, environment)


def replace_process(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Become the command, so that signals reach it and its exit code is ours.

    Raises:
        LaunchError: if the system refuses to execute it.
    """
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores these, and what it executes would inherit that
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(command[0], list(command), dict(environment))
    except OSError as error:
        raise LaunchError(f"{command[0]!r} cannot be executed: {error.strerror}.") from error
