"""Several runs of a folder in one page, made anew while one of them is recorded."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from retrograd.core.errors import CompareError
from retrograd.core.limits import LIMITS
from retrograd.core.plugins import find_provided
from retrograd.core.runs.findings import read_findings
from retrograd.core.runs.listing import read_line
from retrograd.core.runs.reader import open_run
from retrograd.core.views.page.frame import Again


class ComparedRuns:
    """Makes pages of several runs, one after the other, so that memory holds what one page takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._took = 0.0

    def tell_state(self, folders: Sequence[Path]) -> str:
        """A text that changes when one of the runs does, from what a list of runs tells of it."""
        return hashlib.sha256("\n".join(read_line(each).as_json() for each in folders).encode()).hexdigest()[:16]

    def make_page(self, folders: Sequence[Path], base: str, home: str = "") -> str:
        """The page of some runs, which asks at an address. Those of many rows are neither compared nor explained here.

        ``home`` is the address of the list of all runs.

        Raises:
            NotARunError, DamagedRunError: a folder cannot be read.
        """
        with self._lock:
            begun, state = time.monotonic(), self.tell_state(folders)
            runs = [open_run(each) for each in folders]
            goes_on = any(run.status == "running" for run in runs)
            is_long = sum(run.history.rows.count for run in runs) > LIMITS.explained_rows
            refused = CompareError(
                "These runs are too long to be compared whenever the page is opened.",
                repair="`retrograd compare` shows where they diverge.",
            )
            page: str = find_provided("comparison_page")(
                runs,
                comparisons=[refused] * (len(runs) - 1) if is_long else None,
                findings=[read_findings(run) for run in runs] if is_long else None,
                again=Again(base, state, max(LIMITS.compared_pause, self._took / LIMITS.look_share))
                if goes_on
                else None,
                home=home,
            )
            self._took = time.monotonic() - begun
            return page
