"""Attempts: processes that do the same work one after the other, of which the later one goes on with the record.

A launcher such as torchrun starts its workers anew where one has died, and a program may become another one by
``exec``. Either finds the folder of its rank as its own: the process that wrote it is gone, and will not come back.
Where the later one begins ``first_step.py`` finds out.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.core.errors import RunError
from retrograd.core.foreign.text import check_fields, read_json
from retrograd.core.runs.layout import RANK_FILE
from retrograd.core.runs.lock import name_place, start_of

_PROGRAM = secrets.token_hex(6)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A process that writes the folder of a rank, as its ``rank.json`` tells it.

    Attributes:
        process: the machine, its number there, and when it began: the same before and after ``exec``.
        program: a word that another one is chosen for after ``exec``.
        launch: what torchrun calls its launch; empty for a process that it has not started.
        number: how many attempts of this launch were before.
        step: the step at which it went on with their record; None where it began anew, or was the first.
        left: for one that has become another program, the step that was to come, and the weights' sums of squares.
    """

    process: str
    program: str
    launch: str = ""
    number: int = 0
    step: int | None = None
    left: tuple[int, tuple[float, ...]] | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def follows(self, earlier: Attempt) -> bool:
        """Return whether it does again, or goes on with, what an earlier one did, which is over."""
        is_later = bool(self.launch) and self.launch == earlier.launch and self.number > earlier.number
        return is_later or (self.process == earlier.process and self.program != earlier.program)

    def is_beside(self, other: Attempt) -> bool:
        """Return whether another process is of the same attempt, as other ranks are."""
        same = self.launch, self.number, bool(self.launch)
        return same == (other.launch, other.number, True) and self.process != other.process

    def tell(self) -> dict[str, Any]:
        """All of it as plain data."""
        return asdict(self)


def name_attempt() -> Attempt:
    """The attempt that this process is."""
    launch, number = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    if launch == "none":  # nobody has named it; its workers have one parent
        launch = _name_process(os.getppid())
    return Attempt(_name_process(os.getpid()), _PROGRAM, launch, int(number) if number.isdecimal() else 0)


def read_attempt(folder: Path) -> Attempt | None:
    """The attempt that has written the folder of a rank; None where that is not told."""
    with contextlib.suppress(OSError, RunError, ValueError, TypeError, KeyError):
        told = dict(read_json(folder / RANK_FILE)["attempt"])
        if told.get("left") is not None:
            step, sums = told["left"]
            told["left"] = (step, tuple(sums))
        return Attempt(**told)
    return None


def leave(step: int, sums: npt.NDArray[np.float64]) -> Attempt:
    """This attempt, as it tells that the process is about to become another program."""
    return replace(name_attempt(), left=(step, tuple(sums.tolist())))


def _name_process(number: int) -> str:
    return f"{name_place()}/{number}/{start_of(number)}"
