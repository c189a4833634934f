"""Weights & Biases: numbers over an axis of their own, exponents as histograms, findings as alerts and counts."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from retrograd.exports.tracker import OURS, Exponents, write_finding
from retrograd.findings.finding import Finding
from retrograd.libraries import library_needed

with library_needed("wandb", "0.19.10", "trackers"):
    import wandb

STEP = "step"
"""The axis of all numbers: those of the library itself count what was logged."""

_LEVELS = {"critical": "ERROR", "warning": "WARN", "note": "INFO"}


class WandbRun:
    """A run of the library.

    Args:
        run: it.
        home: what names begin with.
        is_ours: it is ended with :meth:`close`.
    """

    def __init__(self, run: wandb.Run, home: str = "", *, is_ours: bool = True) -> None:
        self._run = run
        self._home = home
        self._is_ours = is_ours
        self._step = f"{home}{STEP}"
        self._run.define_metric(f"{home}*", step_metric=self._step)
        self._found: Counter[str] = Counter()

    def add_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({f"{self._home}{name}": value for name, value in numbers.items()} | {self._step: step})

    def add_histogram(self, step: int, name: str, exponents: Exponents) -> None:
        histogram = wandb.Histogram(np_histogram=(exponents.counts, exponents.limits))
        self._run.log({f"{self._home}{name}": histogram, self._step: step})

    def add_finding(self, finding: Finding) -> None:
        self._found[finding.severity] += 1
        self._run.summary[f"{self._home}findings/{finding.severity}"] = self._found[finding.severity]
        title = f"{finding.detector}{f' at {finding.site}' if finding.site else ''}"
        self._run.alert(title, write_finding(finding), level=_LEVELS[finding.severity])

    def close(self, status: str) -> None:
        if self._is_ours:
            self._run.finish(exit_code=int(status != "finished"))


def open_tracker(name: str, folder: Path, sends: bool) -> WandbRun:
    """Open one of the project ``retrograd``, beside those of the program; offline, for ``wandb sync``, if not sent."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(console="off", x_disable_stats=True, quiet=True)  # what is printed is the program's
    exits = sys.exit, sys.excepthook
    run = wandb.init(
        project="retrograd",
        name=name,
        dir=str(folder),
        mode=None if sends else "offline",
        reinit="create_new",
        settings=settings,
    )
    sys.exit, sys.excepthook = exits  # it never gives them back, and is told of the end by us
    return WandbRun(run)


def use_tracker(run: wandb.Run) -> WandbRun:
    """Add to a run of the program."""
    return WandbRun(run, OURS, is_ours=False)
