"""What ``retrograd run`` was asked for, and how it travels to the processes that train: one environment variable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

from retrograd.errors import SavedTensorError, ScheduleError
from retrograd.recording.schedule import NamedSchedule, every, log_schedule
from retrograd.sites.selection import Selection

VARIABLE = "RETROGRAD_RUN"
"""Environment variable that holds the request as JSON. Where it is missing, nothing is recorded."""


@dataclass(frozen=True, slots=True)
class Request:
    """How to record a command.

    Attributes:
        path: run folder, absolute, since a script may change its directory.
        shown: the same as the user wrote it, for messages.
        command: what the user asked to run.
        sites: patterns of the sites to record; None for the default ones.
        steps: record every n-th step, or ``"log"``.
        tensors: patterns of the sites whose tensors are kept whole; None for none.
        histogram: whether to keep histograms of exponents.
        resume: whether to go on with the run that the folder holds.
        inventory: of which backward pass, counted from 0, an inventory is taken; None for none.
        watch: whether what is too dear for every recording is noted too: writes, where NaN is made, kinks.
        limit: how many steps are recorded before the program is ended; None for as many as it makes.
        quiet: whether only what goes wrong with recording is said.
    """

    variable: ClassVar[str] = VARIABLE

    path: str
    shown: str
    command: tuple[str, ...]
    sites: tuple[str, ...] | None = None
    steps: int | str = 1
    tensors: tuple[str, ...] | None = None
    histogram: bool = True
    resume: bool = False
    inventory: int | None = None
    watch: bool = False
    limit: int | None = None
    quiet: bool = False

    @property
    def schedule(self) -> NamedSchedule:
        """Which steps are recorded.

        Raises:
            ScheduleError: for a number of steps that is none.
        """
        return every(self.steps) if isinstance(self.steps, int) else log_schedule()

    def check(self) -> None:
        """Find what can be found wrong before any model is known.

        Raises:
            RetrogradError: saying what.
        """
        for patterns in (self.sites, self.tensors):
            Selection(patterns)
        self.schedule  # noqa: B018
        if self.inventory is not None and self.inventory < 0:
            raise SavedTensorError(f"--inventory {self.inventory} is before the first.", repair="count from 0.")
        if self.limit is not None and self.limit < 1:
            raise ScheduleError(f"After {self.limit} steps there is nothing to explain.", repair="give at least 1.")

    def write(self) -> str:
        """The request as the text of :data:`VARIABLE`."""
        return json.dumps(asdict(self))


def read_request(environment: Mapping[str, str]) -> Request:
    """The request that this process was started with.

    Raises:
        KeyError: if it was not started by ``retrograd run``.
    """
    fields = json.loads(environment[VARIABLE])
    for name in ("command", "sites", "tensors"):
        if fields[name] is not None:
            fields[name] = tuple(fields[name])
    return Request(**fields)
