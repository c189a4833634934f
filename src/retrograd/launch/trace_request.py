"""``retrograd trace``: what it was asked for, and how that travels to the processes that train. Loads without torch."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, NoReturn

from retrograd.errors import TraceError
from retrograd.launch.command import choose_folder, resolve_command
from retrograd.launch.process import start
from retrograd.launch.start import check_writable
from retrograd.runs.ranks import check_vacant


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """How to trace a command.

    Attributes:
        path: folder for the traces, absolute, since a script may change its directory.
        shown: the same as the user wrote it, for messages.
        first, last: backward passes to trace, counted from 0: from ``first`` up to but not including ``last``; None
            for all that follow.
        nodes: pattern of the nodes to show; all are in the files.
        live: whether to print each of them as soon as it has run.
        norms, memory: whether to measure these.
        by, sort: form of the table.
    """

    variable: ClassVar[str] = "RETROGRAD_TRACE"

    path: str
    shown: str
    first: int = 0
    last: int | None = 3
    nodes: str | None = None
    live: bool = False
    norms: bool = False
    memory: bool = False
    by: str = "node"
    sort: str = "time"

    def write(self) -> str:
        """The request as the text of :attr:`variable`."""
        return json.dumps(asdict(self))


def read_trace_request(environment: Mapping[str, str]) -> TraceRequest:
    """The request that this process was started with.

    Raises:
        KeyError: if it was not started by ``retrograd trace``.
    """
    return TraceRequest(**json.loads(environment[TraceRequest.variable]))


def parse_steps(text: str) -> tuple[int, int | None]:
    """Which backward passes: ``3`` for the first three, ``10:12`` for 10 and 11, ``10:`` for all from 10 on.

    Raises:
        TraceError: for anything else, and for none at all.
    """
    begin, colon, end = text.rpartition(":")
    try:
        first, last = int(begin or 0), (int(end) if end or not colon else None)
    except ValueError:
        first, last = 0, 0
    if first < 0 or (last is not None and last <= first):
        raise TraceError(
            f"--steps {text} selects no backward pass.",
            repair="--steps 3 for the first three, --steps 10:12 for the passes 10 and 11, counted from 0.",
        )
    return first, last


def start_trace(arguments: argparse.Namespace) -> NoReturn:
    """Run a command, traced.

    Args:
        arguments: the options of ``retrograd trace``, and the ``command``.

    Raises:
        RetrogradError: for anything that can be found wrong before the command runs.
    """
    command = resolve_command(arguments.command, "trace")
    first, last = parse_steps(arguments.steps)
    folder = arguments.output or choose_folder(arguments.command, "traces")
    request = TraceRequest(
        path=str(Path(folder).absolute()),
        shown=folder,
        first=first,
        last=last,
        nodes=arguments.nodes,
        live=arguments.live,
        norms=arguments.norms,
        memory=arguments.memory or arguments.sort == "memory",
        by=arguments.by,
        sort=arguments.sort,
    )
    check_writable(Path(request.path))
    check_vacant(Path(request.path))
    start(command, request, f"tracing {shlex.join(arguments.command)} into {request.shown}")
