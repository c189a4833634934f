"""Weights & Biases: numbers over an axis of their own, exponents as histograms, findings as alerts and counts."""

from __future__ import annotations

import secrets
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrograd.core.errors import ExportError
from retrograd.core.exports.tracker import OURS, Exponents, write_finding
from retrograd.core.libraries import library_needed
from retrograd.core.runs.findings import Finding

with library_needed("wandb", "0.19.10", "trackers"):
    import wandb

STEP = "step"
"""The axis of all numbers: those of the library itself count what was logged."""

_LEVELS = {"critical": "ERROR", "warning": "WARN", "note": "INFO"}


class WandbRun:
    """A run of the library.

    In a run of the program's own, numbers are put into the row that the program logs next. A row of ours would count
    one on, and what is then logged with ``step=`` and a lower number is dropped by the library.

    Args:
        run: it.
        home: what names begin with.
        is_ours: it is ended with :meth:`close`.
    """

    def __init__(self, run: wandb.Run, home: str = "", *, is_ours: bool = True) -> None:
        self.keeps_last_step = not is_ours
        self.place = f"wandb sync {run.settings.sync_dir}" if run.offline else str(run.url)
        self._run = run
        self._home = home
        self._is_ours = is_ours
        self._step = f"{home}{STEP}"
        self._run.define_metric(f"{home}*", step_metric=self._step)
        self._found: Counter[str] = Counter()

    def add_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        self._log(step, {f"{self._home}{name}": value for name, value in numbers.items()})

    def add_histogram(self, step: int, name: str, exponents: Exponents) -> None:
        histogram = wandb.Histogram(np_histogram=(exponents.counts, exponents.limits))
        self._log(step, {f"{self._home}{name}": histogram})

    def add_finding(self, finding: Finding) -> None:
        self._found[finding.severity] += 1
        self._run.summary[f"{self._home}findings/{finding.severity}"] = self._found[finding.severity]
        title = f"{finding.detector}{f' at {finding.site}' if finding.site else ''}"
        self._run.alert(title, write_finding(finding), level=_LEVELS[finding.severity])

    def close(self, status: str) -> None:
        if self._is_ours:
            self._run.finish(exit_code=int(status != "finished"))

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({**values, self._step: step}, commit=self._is_ours)


def open_tracker(name: str, folder: Path, sends: bool) -> WandbRun:
    """Open one of the project ``retrograd``, beside those of the program; offline, for ``wandb sync``, if not sent.

    Raises:
        ExportError: the program is part of a sweep, which the library gives one run.
    """
    exits = sys.exit, sys.excepthook
    try:
        return WandbRun(_open_run(name, folder, sends))
    finally:
        sys.exit, sys.excepthook = exits  # it never gives them back, and we end it


def _open_run(name: str, folder: Path, sends: bool) -> wandb.Run:
    if wandb.setup().settings.sweep_id:
        raise ExportError(
            "W&B has no run beside that of a sweep.",
            repair="show it in the program's own, rg.mirror(run, wandb.run), or do without WANDB_SWEEP_ID.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(console="off", x_disable_stats=True, quiet=True)  # what is printed is the program's
    return wandb.init(
        project="retrograd",
        id=secrets.token_hex(4),  # WANDB_RUN_ID and WANDB_RESUME are for the program's
        resume="never",
        name=name,
        dir=str(folder),
        mode=None if sends else "offline",
        reinit="create_new",
        settings=settings,
    )


def use_tracker(run: wandb.Run) -> WandbRun:
    """Add to a run of the program."""
    return WandbRun(run, OURS, is_ours=False)
