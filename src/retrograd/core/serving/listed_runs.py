"""The runs of a folder as its page asks for them: what has not changed since is not read again."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from retrograd.core.addresses import bounded, is_remote, store_of
from retrograd.core.errors import CompareError
from retrograd.core.limits import LIMITS
from retrograd.core.plugins import find_provided
from retrograd.core.runs.findings import read_findings
from retrograd.core.runs.layout import EVENTS, FINDINGS, LOCK, MANIFEST, RANK_FILE, STATISTICS, list_rank_folders
from retrograd.core.runs.listed import ListedRun, find_differing
from retrograd.core.runs.listing import RunLine, each_run, find_runs, read_line
from retrograd.core.runs.lock import is_locked
from retrograd.core.runs.loss_curve import LossCurve, read_curve
from retrograd.core.runs.reader import open_run
from retrograd.core.views.page.frame import Again

T = TypeVar("T")


class _Kept(Generic[T]):
    """What was read of a run, when its files were as they are."""

    def __init__(self, state: Hashable, read: Callable[[], T]) -> None:
        begun = time.monotonic()
        self.state, self.value = state, read()
        self._until = time.monotonic() + (time.monotonic() - begun) / LIMITS.look_share

    def is_due(self, state: Hashable) -> bool:
        """Return whether to read it anew: it has changed, and reading it takes a small share of the time."""
        return state != self.state and time.monotonic() >= self._until


class ListedRuns:
    """Runs of a folder, or one alone; called from several threads.

    Args:
        path: of the folder.
        is_single: it is a run itself.
    """

    def __init__(self, path: Path, *, is_single: bool) -> None:
        self._path, self._is_single = path, is_single
        self._lock = threading.Lock()
        self._lines: dict[str, _Kept[RunLine]] = {}
        self._curves: dict[str, tuple[int, _Kept[LossCurve | None]]] = {}
        self._count = 0

    def tell_lines(self) -> dict[str, Any]:
        """The ``runs`` as JSON values, newest first, and the ``columns`` in which their settings differ."""
        with self._lock:
            runs = self._find()
            lines = each_run(self._read_line, runs)
            self._lines = {name: kept for name, kept in self._lines.items() if name in {run.name for run in runs}}
        listed = [ListedRun(each) for each in sorted(lines, key=lambda line: -(line.started or line.written))]
        return {
            "runs": [each.as_facts() for each in listed],
            "columns": find_differing([each.settings for each in listed]),
        }

    def tell_losses(self, since: int) -> dict[str, Any]:
        """Losses that were read after some number of readings; those that take too long now are left for the next time.

        Returns:
            ``losses`` by the name of the run, with None for one that is too long; ``until``, to be given as ``since``;
            and how many runs are ``waiting``.
        """
        with self._lock:
            deadline, waiting = time.monotonic() + LIMITS.list_seconds, 0
            runs = sorted(self._find(), key=self._newest)
            states = dict(zip(runs, each_run(_find_state, runs), strict=True))
            for run, state in states.items():
                known = self._curves.get(run.name)
                if known is not None and not known[1].is_due(state):
                    continue
                if time.monotonic() > deadline:
                    waiting += 1
                    continue
                self._count += 1
                self._curves[run.name] = self._count, _Kept(state, partial(read_curve, run))
            self._curves = {run.name: self._curves[run.name] for run in runs if run.name in self._curves}
            found = {name: kept.value for name, (number, kept) in self._curves.items() if number > since}
            until = self._count
        losses = {name: curve and curve.as_facts() for name, curve in found.items()}
        return {"losses": losses, "until": until, "waiting": waiting}

    def _find(self) -> list[Path]:
        return [self._path] if self._is_single else find_runs(self._path)

    def _newest(self, run: Path) -> float:
        kept = self._lines.get(run.name)
        return 0.0 if kept is None else -(kept.value.started or kept.value.written)

    def _read_line(self, run: Path) -> RunLine:
        state, kept = _find_state(run), self._lines.get(run.name)
        if kept is None or kept.state != state or kept.value.status in ("running", "damaged"):
            kept = self._lines[run.name] = _Kept(state, lambda: read_line(run))
        return kept.value


def _find_state(run: Path) -> Hashable:
    """What changes when anything of a run does that a list shows."""
    if is_remote(run):
        return _find_remote_state(run)
    found: list[Hashable] = []
    for folder in list_rank_folders(run) or [run]:
        found += [is_locked(folder / LOCK), *(_find_stat(folder / name) for name in (RANK_FILE, EVENTS, STATISTICS))]
    return (*found, *(_find_stat(run / name) for name in (MANIFEST, FINDINGS)))


def _find_stat(path: Path) -> tuple[int, int, int] | None:
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns, found.st_size
    return None


@bounded
def _find_remote_state(run: Path) -> Hashable:
    store, name = store_of(run)
    return repr(sorted((path, str(each)) for path, each in store.find(name, detail=True).items()))


# ---- several runs in one page ----


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
