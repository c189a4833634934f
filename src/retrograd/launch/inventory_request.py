"""``retrograd inventory``: what it was asked for, and how that travels to the process. Loads without torch."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, NoReturn

from retrograd.errors import SavedTensorError
from retrograd.launch.command import choose_folder, resolve_command
from retrograd.launch.process import start
from retrograd.launch.start import check_writable
from retrograd.runs.ranks import check_vacant


@dataclass(frozen=True, slots=True)
class InventoryRequest:
    """Of which step of a command to take an inventory.

    Attributes:
        path: folder for it, absolute, since a script may change its directory.
        shown: the same as the user wrote it, for messages.
        step: which backward pass, counted from 0.
        by: what makes a line of the table.
        timed: whether to measure how long operations take.
    """

    variable: ClassVar[str] = "RETROGRAD_INVENTORY"

    path: str
    shown: str
    step: int = 1
    by: str = "module"
    timed: bool = False

    def write(self) -> str:
        """The request as the text of :attr:`variable`."""
        return json.dumps(asdict(self))


def read_inventory_request(environment: Mapping[str, str]) -> InventoryRequest:
    """The request that this process was started with.

    Raises:
        KeyError: if it was not started by ``retrograd inventory``.
    """
    return InventoryRequest(**json.loads(environment[InventoryRequest.variable]))


def start_inventory(arguments: argparse.Namespace) -> NoReturn:
    """Run a command, and take an inventory of one of its steps.

    Args:
        arguments: the options of ``retrograd inventory``, and the ``command``.

    Raises:
        RetrogradError: for anything that can be found wrong before the command runs.
    """
    command = resolve_command(arguments.command, "inventory")
    if arguments.step < 0:
        raise SavedTensorError(f"--step {arguments.step} is before the first.", repair="count from 0.")
    folder = arguments.output or choose_folder(arguments.command, "inventories")
    request = InventoryRequest(
        path=str(Path(folder).absolute()),
        shown=folder,
        step=arguments.step,
        by=arguments.by,
        timed=arguments.timed,
    )
    check_writable(Path(request.path))
    check_vacant(Path(request.path))
    start(command, request, f"taking an inventory of {shlex.join(arguments.command)} into {request.shown}")
