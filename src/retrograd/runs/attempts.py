"""Attempts: processes that do the same work one after the other, of which the later one goes on with the record.

A launcher such as torchrun starts its workers anew where one has died, and a program may become another one by
``exec``. Either finds the folder of its rank as its own: the process that wrote it is gone, and will not come back.
Where the later attempt begins is known by its weights: they are those that some recorded update was made to.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.addresses import reaching
from retrograd.errors import RunError
from retrograd.foreign.text import check_fields, read_json
from retrograd.history.arrays import read_numbers
from retrograd.runs.claim import name_place, start_of
from retrograd.runs.layout import RANK_FILE, STATISTICS, is_extra, list_parts, list_rank_folders, parse_rank
from retrograd.runs.parts import PartFile, explain_damage

FloatArray = npt.NDArray[np.float64]

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
        """Tell whether it does again, or goes on with, what an earlier one did, which is over."""
        is_later = bool(self.launch) and self.launch == earlier.launch and self.number > earlier.number
        return is_later or (self.process == earlier.process and self.program != earlier.program)

    def is_beside(self, other: Attempt) -> bool:
        """Tell whether another process is of the same attempt, as other ranks are."""
        same = self.launch, self.number, bool(self.launch)
        return same == (other.launch, other.number, True) and self.process != other.process

    def tell(self) -> dict[str, Any]:
        """All of it as plain data."""
        return asdict(self)


def name_attempt(environment: Mapping[str, str] = os.environ) -> Attempt:
    """The attempt that this process is."""
    launch, number = environment.get("TORCHELASTIC_RUN_ID", ""), environment.get("TORCHELASTIC_RESTART_COUNT", "")
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


def find_first_step(run: Path, measure: Callable[[], FloatArray]) -> int | None:
    """The step at which this process goes on with what earlier attempts have recorded.

    Args:
        run: the run folder, which need not be there.
        measure: gives for each parameter the sum of its squares, as updates are recorded with it.

    Returns:
        None where there was none, or its record has no step that was begun with these weights.
    """
    mine, own = name_attempt(), os.environ.get("RANK", "")
    with contextlib.suppress(OSError, RunError), reaching(run):
        folders = [folder for folder in list_rank_folders(run) if not is_extra(folder.name)]
        folders.sort(key=lambda folder: (str(parse_rank(folder.name)) != own, folder.name))
        told = {folder: attempt for folder in folders if (attempt := read_attempt(folder)) is not None}
        beside = next((attempt for attempt in told.values() if mine.is_beside(attempt)), None)
        if beside is not None:  # one answer for all ranks
            return beside.step
        earlier = {folder: attempt for folder, attempt in told.items() if mine.follows(attempt)}
        if earlier:
            sums = measure()
            found = (_find_step(folder, attempt, sums) for folder, attempt in earlier.items())
            return next((step for step in found if step is not None), None)
    return None


def _find_step(folder: Path, attempt: Attempt, sums: FloatArray) -> int | None:
    """The first step of a rank whose updates were made to weights of these sums of squares."""
    if attempt.left is not None and len(sums) and np.isin(sums, attempt.left[1]).all():
        return attempt.left[0]
    counts: dict[int, list[int]] = {}
    for steps, references in _list_updates(folder):
        are_known = np.isin(references, sums)
        for step in np.unique(steps).tolist():
            of_step = steps == step
            known, all_of_step = counts.setdefault(step, [0, 0])
            counts[step] = [known + int(are_known[of_step].sum()), all_of_step + int(of_step.sum())]
    return min((step for step, (known, all_of_step) in counts.items() if known == all_of_step), default=None)


def _list_updates(folder: Path) -> Iterator[tuple[npt.NDArray[np.int64], FloatArray]]:
    """Steps of updates, and the sum of squares of the weight that each was made to."""
    for _, path in list_parts(folder / STATISTICS):
        file = PartFile(path)
        with explain_damage(path):
            for number in range(file.metadata.num_row_groups):
                group = file.read_group(number, ["step", "reference"])
                references = read_numbers(group["reference"])
                are_updates = references > 0
                yield read_numbers(group["step"])[are_updates], references[are_updates]


def leave(step: int, sums: FloatArray) -> Attempt:
    """This attempt, as it tells that the process is about to become another program."""
    return replace(name_attempt(), left=(step, tuple(sums.tolist())))


def _name_process(number: int) -> str:
    return f"{name_place()}/{number}/{start_of(number)}"
