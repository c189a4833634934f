"""Becoming the command that a request asks to run, once all that can be checked before is right."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TypeVar

from retrograd.errors import RunWriteError
from retrograd.launch.closing import say
from retrograd.launch.command import choose_folder, resolve_command
from retrograd.launch.interpreter import find_obstacle
from retrograd.launch.options import Request
from retrograd.launch.process import make_environment, replace_process
from retrograd.runs.ranks import check_vacant

RequestT = TypeVar("RequestT", bound=Request)


def start(request: Request, promise: str, *, parent: str = "runs") -> NoReturn:
    """Say what will be done, and become the command; or say why it will not be done, and become it all the same.

    Args:
        request: what its processes are to do.
        promise: what is said, with ``{}`` for the command and for the folder; nothing where it is empty.
        parent: where folders of such requests lie, for one without a folder; empty where it needs none.

    Raises:
        RetrogradError: for anything that can be found wrong before the command runs.
    """
    words = resolve_command(request.command, request.name)
    request.check()
    request = choose_vacant(request, parent) if parent else request
    environment = make_environment(request, os.environ)
    if said := find_obstacle(words, environment) or promise.format(shlex.join(request.command), request.shown):
        say(said)
    replace_process(words, environment)


def choose_vacant(request: RequestT, parent: str = "runs") -> RequestT:
    """The same request with a folder that can be made. It is not made yet: perhaps the command trains nothing.

    Args:
        request: with the folder that the user has named, or none.
        parent: where a new folder lies for one that has none.

    Raises:
        RetrogradError: the folder cannot be written, or holds something already.
    """
    shown = request.shown or choose_folder(request.command, parent)
    path = Path(shown).absolute()
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise RunWriteError(f"{str(path)!r} cannot be made: {str(there)!r} is not a folder that we may write to.")
    check_vacant(path, resume=getattr(request, "resume", False))
    return replace(request, path=str(path), shown=shown)
