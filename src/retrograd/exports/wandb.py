"""Weights & Biases: numbers over an axis of their own, exponents as histograms, findings as alerts and counts."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrograd.exports.tracker import Exponents, write_finding
from retrograd.findings.finding import Finding
from retrograd.libraries import library_needed

with library_needed("wandb", "0.19.10", "trackers"):
    import wandb

STEP = "step"
"""The axis of all numbers: those of the library itself count what was logged."""

_LEVELS = {"critical": "ERROR", "warning": "WARN", "note": "INFO"}


class WandbRun:
    """A run beside those that the program has itself, to which nothing of it is added.

    Args:
        options: as for ``wandb.init``.
    """

    def __init__(self, **options: Any) -> None:
        exits = sys.exit, sys.excepthook
        self._run = wandb.init(**options)
        sys.exit, sys.excepthook = exits  # it never gives them back, and is told of the end by us
        self._run.define_metric("*", step_metric=STEP)
        self._found: Counter[str] = Counter()

    def add_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({**numbers, STEP: step})

    def add_histogram(self, step: int, name: str, exponents: Exponents) -> None:
        histogram = wandb.Histogram(np_histogram=(exponents.counts, exponents.limits))
        self._run.log({name: histogram, STEP: step})

    def add_finding(self, finding: Finding) -> None:
        self._found[finding.severity] += 1
        self._run.summary[f"findings/{finding.severity}"] = self._found[finding.severity]
        title = f"{finding.detector}{f' at {finding.site}' if finding.site else ''}"
        self._run.alert(title, write_finding(finding), level=_LEVELS[finding.severity])

    def close(self, status: str) -> None:
        self._run.finish(exit_code=int(status != "finished"))


def open_tracker(name: str, folder: Path) -> WandbRun:
    """Open one of the project ``retrograd``, which is offline, for ``wandb sync``."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(console="off", x_disable_stats=True, quiet=True)  # what is printed is the program's
    return WandbRun(
        project="retrograd", name=name, dir=str(folder), mode="offline", reinit="create_new", settings=settings
    )
