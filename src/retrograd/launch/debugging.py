"""``retrograd debug``: what it was asked for, and how that travels to the process that trains. Loads without torch."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar, NoReturn

from retrograd.launch.command import resolve_command
from retrograd.launch.process import start


@dataclass(frozen=True, slots=True)
class DebugRequest:
    """How to debug a command.

    Attributes:
        breakpoints: texts of the breakpoints to begin with.
        nonfinite: whether to stop where a gradient is not finite.
    """

    variable: ClassVar[str] = "RETROGRAD_DEBUG"

    breakpoints: tuple[str, ...] = ()
    nonfinite: bool = True

    def write(self) -> str:
        """The request as the text of :attr:`variable`."""
        return json.dumps(asdict(self))


def read_debug_request(environment: Mapping[str, str]) -> DebugRequest:
    """The request that this process was started with.

    Raises:
        KeyError: if it was not started by ``retrograd debug``.
    """
    fields = json.loads(environment[DebugRequest.variable])
    return DebugRequest(tuple(fields["breakpoints"]), fields["nonfinite"])


def start_debugging(arguments: argparse.Namespace) -> NoReturn:
    """Run a command that stops inside its backward passes.

    Args:
        arguments: the options of ``retrograd debug``, and the ``command``.

    Raises:
        RetrogradError: for anything that can be found wrong before the command runs.
    """
    command = resolve_command(arguments.command, "debug")
    request = DebugRequest(tuple(arguments.breakpoints or ()), arguments.nonfinite)
    start(command, request, f"debugging {shlex.join(arguments.command)}; a prompt opens where a backward pass stops")
