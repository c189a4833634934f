"""What a tracker of experiments is to us: it takes numbers, histograms and findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from retrograd.core.randomness import random_kept
from retrograd.core.runs.findings import Finding, list_grounds, list_place, tell_repair

TRACKERS = ("tensorboard", "wandb", "mlflow")
"""Their names, those of files here; each has ``open_tracker(name, folder, sends)`` and ``use_tracker(run)``."""

OURS = "retrograd/"
"""What names begin with in a run of the program's own."""

_LIBRARIES = {
    "wandb": "wandb",
    "mlflow": "mlflow",
    "torch.utils.tensorboard": "tensorboard",
    "tensorboardX": "tensorboard",
}


class Exponents(NamedTuple):
    """How the magnitudes of a tensor's elements are spread, but for zeros and what is not finite.

    Attributes:
        limits: of the bins, as log2 of the magnitude: float64, shape ``[n + 1]``.
        counts: elements in each bin: int64, shape ``[n]``.
    """

    limits: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]


class Tracker(Protocol):
    """Takes what is reported of a run. Called from one thread; steps rise, but for those of histograms.

    Attributes:
        keeps_last_step: of all steps that are told at once, it keeps the last.
        place: where the run can be seen: an address, or a command.
    """

    keeps_last_step: bool
    place: str

    def add_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of one step, which may be NaN: ``loss``, ``rms/fc:output``."""

    def add_histogram(self, step: int, name: str, exponents: Exponents) -> None:
        """Take a histogram."""

    def add_finding(self, finding: Finding) -> None:
        """Take a finding."""

    def close(self, status: str) -> None:
        """Write or send what is left; ``status`` is ``finished``, ``failed``, ``stopped`` or ``running``."""


def open_tracker(to: str, name: str, folder: Path, *, sends: bool = False) -> Tracker:
    """Open a tracker, with a run of its own.

    Args:
        to: which one of :data:`TRACKERS`.
        name: what it calls the run.
        folder: where it writes.
        sends: it sends to where the program's own runs are sent; else nothing is sent.

    Raises:
        LibraryError: its library is missing, or too old.
    """
    with random_kept():  # libraries draw names for runs, and a script may have seeded before
        make: Callable[[str, Path, bool], Tracker] = import_module(f"retrograd.core.exports.{to}").open_tracker
        return make(name, folder, sends)


def use_tracker(to: str, run: Any) -> Tracker:
    """A tracker that adds to a run of the program's own, and does not end it.

    Args:
        to: which one of :data:`TRACKERS`.
        run: that run, of that library.

    Raises:
        LibraryError: the library is too old.
    """
    with random_kept():
        make: Callable[[Any], Tracker] = import_module(f"retrograd.core.exports.{to}").use_tracker
        return make(run)


def find_library(run: Any) -> str | None:
    """The tracker whose library an object is from; None where there is none."""
    homes = [kind.__module__ for kind in type(run).__mro__]
    found = (to for home in homes for start, to in _LIBRARIES.items() if f"{home}.".startswith(f"{start}."))
    return next(found, None)


def write_finding(finding: Finding) -> str:
    """A finding as paragraphs of plain text."""
    place = ", ".join(list_place(finding))
    grounds = [f"{heading}: {text}" for heading, text in list_grounds(finding)]
    return "\n\n".join(part for part in (str(finding), place, tell_repair(finding), *grounds) if part)
