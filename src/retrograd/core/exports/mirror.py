"""``rg.mirror``: a chosen few series, and all findings, in a tracker while a model trains."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from retrograd.core.addresses import local_path
from retrograd.core.amounts import count_of
from retrograd.core.errors import ExportError, NoSuchSiteError
from retrograd.core.exports.numbers import StepArray, list_steps, read_histograms, read_numbers, spread_steps
from retrograd.core.exports.tracker import TRACKERS, Tracker, find_library, open_tracker, use_tracker
from retrograd.core.guesses import names_arguments
from retrograd.core.history.history import History
from retrograd.core.history.matrix import check_name
from retrograd.core.history.rows import StoredPart
from retrograd.core.history.sink import Phase
from retrograd.core.limits import LIMITS
from retrograd.core.notices import warn
from retrograd.core.ranks.processes import ask_rank
from retrograd.core.runs.findings import Finding, explain_run
from retrograd.core.runs.lookout import Lookout
from retrograd.core.runs.reader import Given, Run, open_run, read_run
from retrograd.core.sites.pattern import Candidate, Pattern
from retrograd.core.sites.selection import Selection, suggest
from retrograd.core.sites.site import parse_leniently
from retrograd.core.views.shown import find_phase

MOST_SITES = 24
"""Sites that are mirrored where nobody has chosen some: gradients of weights, evenly spaced over the model."""

MOST_STEPS = 50
"""Steps that are told at one look."""

_OPEN = 2
"""The last recorded steps, which gradients that come late may still change: a critic trains before its generator."""

_BEFORE = 64
"""Steps before those that are told in which learning rates are looked up."""

_RARER = 50
"""A histogram is told when training has gone on by one part in so many."""


@runtime_checkable
class Closing(Protocol):
    """A recording that goes on."""

    def call_when_closed(self, call: Callable[[], None]) -> None:
        """Have a function called when the record is complete."""


@names_arguments
def mirror(
    run: Given,
    to: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    sites: Pattern | Iterable[Pattern] | None = None,
    statistics: Sequence[str] = ("rms",),
    histograms: bool = True,
) -> Mirror:
    """Show the scalars, a chosen few series and all findings of a run in a tracker, while the run goes on.

    A thread of its own reads the record every few seconds; training neither waits for it nor hears of its errors. It
    ends with the recording. In processes of other ranks than the first nothing is mirrored.

    Args:
        run: a recording, or the folder of a run that is still recorded, perhaps by another process.
        to: ``"wandb"``, ``"mlflow"`` or ``"tensorboard"``, for a run of its own, which is sent to where that library
            sends the program's own; or a run of the program's: a W&B run, an MLflow run, a ``SummaryWriter``. There
            all names begin with ``retrograd/``, and the run is not ended.
        path: the folder of files that are written; inside the run folder when left out.
        sites: which sites, as for :func:`retrograd.record`; the gradients of at most :data:`MOST_SITES` weights, evenly
            spaced over the model, when left out.
        statistics: their statistics.
        histograms: tell the exponents too, the more rarely the longer training goes on.

    Raises:
        ExportError: there is no such tracker, or no folder to write to.
        LibraryError: its library is missing, or too old.
        PatternError, StatisticError: for what cannot be chosen.
        NothingRecordedError, NotARunError, DamagedRunError: there is no run.
    """
    if isinstance(to, str) and to not in TRACKERS:
        raise ExportError(f"A run is not mirrored to {to!r}.", repair=f"give one of {', '.join(map(repr, TRACKERS))}.")
    library = to if isinstance(to, str) else find_library(to)
    if library is None:
        raise ExportError(
            f"A run is not mirrored to an object of type {type(to).__name__}.",
            repair=f"give a run of W&B or MLflow, a SummaryWriter, or one of {', '.join(map(repr, TRACKERS))}.",
        )
    found = read_run(run)
    record = open_run(found.path) if isinstance(found, Run) else found  # refreshed in another thread than yours
    history = record.history if isinstance(record, Run) else record
    for name in statistics:
        check_name(name, list(history.manifest.get("statistics") or ()))
    choice = None if sites is None else Selection(sites)

    def open_it() -> Tracker:
        if not isinstance(to, str):
            return use_tracker(library, to)
        return open_tracker(to, _name(record, path), _find_folder(record, to, path), sends=True)

    mirrored = Mirror(record, open_it if ask_rank() == 0 else None, library, choice, tuple(statistics), histograms)
    if isinstance(run, Closing):
        run.call_when_closed(mirrored.close)
    return mirrored


class Mirror:
    """A mirror that goes on until its run is over, or it is closed.

    Attributes:
        steps: how many steps were sent to the tracker.
        skipped: how many were left out, since more were made than are told at a time.
    """

    def __init__(
        self,
        record: Run | History,
        open_it: Callable[[], Tracker] | None,
        library: str,
        choice: Selection | None,
        statistics: tuple[str, ...],
        histograms: bool,
    ) -> None:
        self._record = record
        self._library = library
        self._choice = choice
        self._statistics = statistics
        self._histograms = histograms
        self._phase: Phase | None = None
        self._next = 0
        self._next_histogram = 0
        self._default: list[str] = []
        self._unmatched_reported = False
        self._seen: set[tuple[str, str]] = set()
        self._reported: set[tuple[str, str]] = set()
        self.steps = self.skipped = 0
        self._lookout: Lookout | None = None
        if open_it is not None:
            self._tracker = open_it()
            self._lookout = Lookout(self._look, f"mirror to {library}")

    @property
    def place(self) -> str:
        """Where it can be seen: an address, or a command; empty in processes of other ranks than the first."""
        return "" if self._lookout is None else self._tracker.place

    @property
    def is_over(self) -> bool:
        """True once the tracker was told the last of it."""
        return self._lookout is None or self._lookout.is_over

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the run is over and the tracker was told the last of it, for ``timeout`` seconds at most.

        Returns:
            Whether it is so.
        """
        if self._lookout is not None:
            self._lookout.wait(timeout)
        return self.is_over

    def close(self) -> None:
        """Send what is left, and end. Calling it twice is harmless."""
        if self._lookout is not None:
            self._lookout.end()

    def __repr__(self) -> str:
        return f"<Mirror to {self._library}, {self.told}{', ended' if self.is_over else ''}>"

    @property
    def told(self) -> str:
        """What the tracker was told so far, in words."""
        return count_of(self.steps, "step") + (f", {self.skipped:,} skipped" if self.skipped else "")

    # ---- in a thread of its own ----

    def _look(self, is_last: bool) -> None:
        if isinstance(self._record, Run):
            self._record.refresh()
        try:
            self._tell_steps(is_last=is_last)
            self._tell_findings(is_last=is_last)
        finally:
            if is_last:
                self._tracker.close(self._status)
        if isinstance(self._record, Run) and self._status != "running" and self._lookout is not None:
            self._lookout.stop()

    @property
    def _status(self) -> str:
        if isinstance(self._record, Run):
            return self._record.status
        return str(self._record.manifest.get("status", "running"))

    def _tell_steps(self, *, is_last: bool) -> None:
        record = self._record
        window = (record.history if isinstance(record, Run) else record).since(self._next)
        steps = self._list_complete(window, is_last=is_last)
        if self._phase is None or not len(steps):
            return
        chosen = steps[-1:] if self._tracker.keeps_last_step else spread_steps(steps, MOST_STEPS)
        sites = self._choose(window)
        whole = record.history if isinstance(record, Run) else record
        scalars = whole.since(max(self._next - _BEFORE, 0)).scalars  # what does not change is told now and then
        limits = self._next, int(steps[-1])
        found = read_numbers(window, sites, self._statistics, self._phase, chosen, scalars, limits)
        for step, numbers in found:
            self._tracker.add_numbers(step, numbers)
            self.steps += 1
        self.skipped += len(steps) - len(chosen)
        last = int(steps[-1])
        self._next = last + 1
        if self._histograms and last >= self._next_histogram:
            self._next_histogram = last + 1 + last // _RARER
            for step, name, exponents in read_histograms(window, sites, self._phase, steps[-1:]):
                self._tracker.add_histogram(step, name, exponents)

    def _list_complete(self, window: History, *, is_last: bool) -> StepArray:
        """Steps of which no more is to come; none before it is known whether the run trains."""
        phase = find_phase(window)
        if self._phase is None and (phase == "train" or is_last):
            self._phase = phase
        if self._phase is None:
            return np.empty(0, np.int64)
        steps = list_steps(window, self._phase)
        steps = steps[steps >= self._next]
        if is_last:
            return steps
        ends: dict[int, int] = {}  # each rank writes in its own time
        for part in window.rows.parts:
            if isinstance(part, StoredPart):
                ends[part.rank] = max(part.step_limits[1], ends.get(part.rank, -1))
        ranks = {part.rank for part in self._all_parts if isinstance(part, StoredPart)}
        limits = window.rows.step_limits  # losses come before rows
        end = min((ends.get(rank, -1) for rank in ranks), default=limits[1] if limits else -1)
        return steps[steps <= end][:-_OPEN]

    @property
    def _all_parts(self) -> Sequence[Any]:
        return self._record.history.rows.parts if isinstance(self._record, Run) else ()

    def _choose(self, window: History) -> list[str]:
        sites = window.sites if window.rows.count else []
        if self._choice is not None:
            candidates = {name: Candidate(parse_leniently(name)) for name in sites}
            self._tell_unmatched(self._choice, list(candidates.values()))
            return [name for name, candidate in candidates.items() if self._choice.wants(candidate)]
        if not self._default:
            weights = [name for name in sites if _is_weight_gradient(name)] or sites
            places = np.linspace(0, len(weights) - 1, min(len(weights), MOST_SITES)).astype(int)
            self._default = [weights[place] for place in np.unique(places)]
        there = set(sites)
        return [name for name in self._default if name in there]

    def _tell_unmatched(self, choice: Selection, candidates: list[Candidate]) -> None:
        if self._unmatched_reported or not candidates:
            return
        self._unmatched_reported = True
        for pattern in choice.unmatched(candidates):
            error = NoSuchSiteError(
                f"The pattern {str(pattern)!r} matches no site that is mirrored.", repair=suggest(pattern, candidates)
            )
            warn(str(error))

    def _tell_findings(self, *, is_last: bool) -> None:
        """Send each finding once: when it was found twice in a row, or at the end."""
        found = {(each.detector, each.site): each for each in self._find()}
        for key, finding in found.items():
            if key not in self._reported and (is_last or key in self._seen):
                self._tracker.add_finding(finding)
                self._reported.add(key)
        self._seen = set(found)

    def _find(self) -> Iterable[Finding]:
        record = self._record
        history = record.history if isinstance(record, Run) else record
        return explain_run(record) if 0 < history.rows.count <= LIMITS.explained_rows else ()


def _is_weight_gradient(name: str) -> bool:
    site = parse_leniently(name)
    return site.kind == "parameter" and site.quantity == "grad" and site.slot.endswith("weight")


def _name(record: Run | History, path: str | os.PathLike[str] | None) -> str:
    return record.path.name if isinstance(record, Run) else Path(path or "retrograd").name


def _find_folder(record: Run | History, to: str, path: str | os.PathLike[str] | None) -> Path:
    """The folder to write to.

    Raises:
        ExportError: a recording in memory has none.
        RunWriteError: it is an address, or a link.
    """
    if path is not None:
        return Path(local_path(path))
    if not isinstance(record, Run):
        raise ExportError(
            f"A recording in memory has no folder for what is written to {to}.",
            repair=f'say where: rg.mirror(recording, "{to}", FOLDER); or record to a folder.',
        )
    return local_path(record.path / to)
