"""What a tracker of experiments is to us: it takes numbers, histograms and findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from retrograd.findings.finding import Finding, list_grounds, list_place, tell_repair
from retrograd.randomness import random_kept

TRACKERS = ("tensorboard", "wandb", "mlflow")
"""Their names, which are those of files here; each has a function ``open_tracker(name, folder)``."""


class Exponents(NamedTuple):
    """How the magnitudes of a tensor's elements are spread, but for zeros and what is not finite.

    Attributes:
        limits: of the bins, as log2 of the magnitude: float64, shape ``[n + 1]``.
        counts: elements in each bin: int64, shape ``[n]``.
    """

    limits: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]


class Tracker(Protocol):
    """Takes what is told of a run. Called from one thread; steps rise, but for those of histograms."""

    def add_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of one step, which may be NaN: ``loss``, ``rms/fc:output``."""

    def add_histogram(self, step: int, name: str, exponents: Exponents) -> None:
        """Take a histogram."""

    def add_finding(self, finding: Finding) -> None:
        """Take a finding."""

    def close(self, status: str) -> None:
        """Write or send what is left; ``status`` is ``finished``, ``failed``, ``stopped`` or ``running``."""


def open_tracker(to: str, name: str, folder: Path) -> Tracker:
    """Open a tracker.

    Args:
        to: which one of :data:`TRACKERS`.
        name: what it calls the run.
        folder: where it writes, sending nothing.

    Raises:
        LibraryError: its library is missing, or too old.
    """
    with random_kept():  # libraries draw names for runs, and a script may have seeded before
        make: Callable[[str, Path], Tracker] = import_module(f"retrograd.exports.{to}").open_tracker
        return make(name, folder)


def write_finding(finding: Finding) -> str:
    """A finding as paragraphs of plain text."""
    place = ", ".join(list_place(finding))
    grounds = [f"{heading}: {text}" for heading, text in list_grounds(finding)]
    return "\n\n".join(part for part in (str(finding), place, tell_repair(finding), *grounds) if part)
