"""``retrograd run``: check what was asked for, say so, and become the command."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import NoReturn

from retrograd.errors import RunWriteError
from retrograd.launch.command import choose_folder, resolve_command
from retrograd.launch.process import start
from retrograd.launch.request import Request
from retrograd.runs.ranks import check_vacant


def start_command(arguments: argparse.Namespace) -> NoReturn:
    """Run a command, recorded.

    Args:
        arguments: the options of ``retrograd run``, and the ``command``.

    Raises:
        RetrogradError: for anything that can be found wrong before the command runs.
    """
    command = resolve_command(arguments.command)
    folder = arguments.output or choose_folder(arguments.command)
    request = Request(
        path=str(Path(folder).absolute()),
        shown=folder,
        command=tuple(arguments.command),
        sites=arguments.sites,
        steps=arguments.schedule or arguments.every,
        tensors=arguments.tensors,
        histogram=arguments.histogram,
        resume=arguments.resume,
        inventory=arguments.inventory,
        quiet=arguments.quiet,
    )
    request.check()
    check_writable(Path(request.path))
    check_vacant(Path(request.path), resume=request.resume)
    promise = "" if request.quiet else f"recording {shlex.join(request.command)} in {request.shown}"
    start(command, request, promise)


def check_writable(run: Path) -> None:
    """Make sure that a folder can be made. It is not made yet: it may be that the command trains nothing.

    Raises:
        RunWriteError: it cannot.
    """
    there = next(folder for folder in (run, *run.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise RunWriteError(f"{str(run)!r} cannot be made: {str(there)!r} is no folder that we may write to.")
