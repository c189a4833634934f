"""Becoming the command, in an environment in which every Python process below does what was asked for."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from retrograd.errors import LaunchError
from retrograd.launch.options import Request

BOOTSTRAP = Path(__file__).parent / "bootstrap"
"""Folder of the ``sitecustomize`` that every Python process below finds first."""

OURS = "RETROGRAD_"
"""Prefix of all our environment variables."""


def make_environment(request: Request, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which every Python process does as requested, and nothing else that we were asked before."""
    hidden = environment.get("PYTHONPATH")
    paths = [path for path in hidden.split(os.pathsep) if path != str(BOOTSTRAP)] if hidden else []
    theirs = {name: value for name, value in environment.items() if not name.startswith(OURS)}
    return {**theirs, request.variable: request.write(), "PYTHONPATH": os.pathsep.join([str(BOOTSTRAP), *paths])}


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
