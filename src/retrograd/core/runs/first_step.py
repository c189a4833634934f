"""The step at which an attempt goes on: that of which some recorded update was made to the weights that it has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from retrograd.core.addresses import reaching
from retrograd.core.errors import RunError
from retrograd.core.history.arrays import read_numbers
from retrograd.core.runs.attempts import Attempt, name_attempt, read_attempt
from retrograd.core.runs.layout import STATISTICS, is_extra, list_parts, list_rank_folders, parse_rank
from retrograd.core.runs.parts import PartFile, explain_damage

FloatArray = npt.NDArray[np.float64]


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
