"""How far an extraction is: a bar on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from retrograd.randomness import random_kept

if TYPE_CHECKING:
    from rich.progress import Progress

_SECONDS_A_LINE = 10.0
_SECONDS_A_FRAME = 0.1


class ProgressReport:
    """Tells on stderr how many batches are done.

    Args:
        done: batches that an earlier extraction has done.
        total: all batches; None if nobody knows.
        shown: otherwise nothing is printed.
    """

    def __init__(self, done: int, total: int | None, *, shown: bool) -> None:
        self._done, self._total, self._samples = done, total, 0
        self._shown = shown
        self._next = time.monotonic() + _SECONDS_A_LINE
        self._bar = self._open_bar() if shown and sys.stderr.isatty() else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._show()
        if self._bar is not None:
            self._bar.stop()

    def advance(self, samples: int) -> None:
        """A batch of so many samples is done."""
        self._done += 1
        self._samples += samples
        if self._shown and time.monotonic() >= self._next:
            self._show()

    def _open_bar(self) -> Progress:
        with random_kept():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        columns = (TextColumn("features"), BarColumn(), MofNCompleteColumn(), TextColumn("batches"))
        self._next = time.monotonic()
        console = Console(stderr=True)
        bar = Progress(*columns, TimeRemainingColumn(), console=console, auto_refresh=False)  # no thread of its own
        bar.add_task("features", total=self._total, completed=self._done)
        return bar

    def _show(self) -> None:
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done, refresh=True)
            self._next = now + _SECONDS_A_FRAME
        elif self._shown:
            total = "" if self._total is None else f" of {self._total:,}"
            print(f"features: {self._done:,}{total} batches, {self._samples:,} samples in this call", file=sys.stderr)
            self._next = now + _SECONDS_A_LINE
