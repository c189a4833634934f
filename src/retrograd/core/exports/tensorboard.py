"""TensorBoard: numbers as scalars, exponents as histograms, findings as texts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from retrograd.core.exports.tracker import OURS, Exponents, write_finding
from retrograd.core.libraries import library_needed
from retrograd.core.runs.findings import Finding

with library_needed("tensorboard", "2.10"):
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardFiles:
    """Event files in a folder.

    Args:
        writer: writes them.
        home: what names begin with.
        is_ours: it is closed with :meth:`close`.
    """

    keeps_last_step = False

    def __init__(self, writer: SummaryWriter, home: str = "", *, is_ours: bool = True) -> None:
        self.place = f"tensorboard --logdir {writer.log_dir}"
        self._writer = writer
        self._home = home
        self._is_ours = is_ours

    def add_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(f"{self._home}{name}", value, step)

    def add_histogram(self, step: int, name: str, exponents: Exponents) -> None:
        limits, counts = exponents.limits, exponents.counts.astype(float)
        middles = (limits[1:] + limits[:-1]) / 2
        self._writer.add_histogram_raw(
            f"{self._home}{name}",
            min=limits[0],
            max=limits[-1],
            num=counts.sum(),
            sum=(counts * middles).sum(),
            sum_squares=(counts * middles**2).sum(),
            bucket_limits=limits[1:].tolist(),
            bucket_counts=counts.tolist(),
            global_step=step,
        )

    def add_finding(self, finding: Finding) -> None:
        text = f"**{finding.severity}** {write_finding(finding)}"
        self._writer.add_text(f"{self._home}findings/{finding.detector}", text, finding.step)

    def close(self, status: str) -> None:
        if self._is_ours:
            self._writer.close()
        else:
            self._writer.flush()


def open_tracker(name: str, folder: Path, sends: bool) -> TensorBoardFiles:
    """Open one; TensorBoard calls a run as its folder, and sends nothing."""
    return TensorBoardFiles(SummaryWriter(log_dir=os.fspath(folder)))


def use_tracker(writer: SummaryWriter) -> TensorBoardFiles:
    """Add to what a writer of the program writes."""
    return TensorBoardFiles(writer, OURS, is_ours=False)
