"""What all callbacks of trainers have in common: a recording that begins and ends when a trainer says so."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from torch import nn

from retrograd.core.addresses import open_folder
from retrograd.core.amounts import count_of
from retrograd.core.errors import ScalarError
from retrograd.core.launch.live_findings import LiveFindings, say_critical
from retrograd.core.launch.start import name_folder
from retrograd.core.limits import LIMITS
from retrograd.core.notices import say
from retrograd.core.randomness import random_kept
from retrograd.core.ranks.processes import ask_rank
from retrograd.core.recording.keep import DEFAULT_BUDGET, Keep
from retrograd.core.recording.record import Recording, choose_schedule, record
from retrograd.core.recording.schedule import Schedule, count_recorded
from retrograd.core.recording.settings import Settings, UserStatistic
from retrograd.core.runs.chosen_ranks import Ranks, read_ranks
from retrograd.core.runs.dated import DATE, make_dated
from retrograd.core.runs.ending import find_exception
from retrograd.core.runs.findings import SEVERITIES, Finding, Findings
from retrograd.core.runs.layout import is_run
from retrograd.core.runs.reader import open_run
from retrograd.core.sites.pattern import Pattern
from retrograd.explaining.launch.explaining import find_and_store, tell_verdict
from retrograd.integrations.boards import Board, send_alert, write_text

T = TypeVar("T")

Share = Callable[[Any], Any]
"""Gives all processes what the first one has."""

Log = Callable[[dict[str, float]], Any]
"""Takes numbers by their names."""

Status = Literal["finished", "failed"]


def keep_own(value: T) -> T:
    """Share nothing: there is one process."""
    return value


class TrainedRun:
    """Records what a trainer trains: the base of the callbacks, which takes what :func:`retrograd.record` takes.

    It may serve several runs of a trainer, one after the other, each with a folder of its own: ``runs/first``, then
    ``runs/first-2``. A trainer that goes on, from its checkpoint or by itself, goes on with its folder. Copies and
    pickles have the options, and no recording. In a ``with`` statement the recording ends where that is left.

    Args:
        path: the run folder; ``{date}`` in its name is the date and time. ``runs/MODEL-DATE-TIME`` by default.
        sites: as for :func:`retrograd.record`, like all that follow.
        schedule: which steps.
        tensors: sites whose tensors are kept.
        statistics: which statistics.
        histogram: count binary exponents too.
        tensor_budget: bytes of kept tensors.
        ranks: which ranks record.
        quiet: print nothing.

    Attributes:
        recording: the recording that goes on, or has ended last; None before the first.
        findings: what was wrong with the run that has ended last, in the first process; None before, or where there
            are too many rows to be looked through by the way.

    Raises:
        RecordingError: for a schedule, statistic or policy that cannot be carried out.
    """

    _abandoned: Status = "failed"
    """How a run has ended whose trainer never said that it has."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        sites: Pattern | Iterable[Pattern] | None = None,
        schedule: int | Schedule | None = None,
        every: int | None = None,
        tensors: Keep | Pattern | Iterable[Keep | Pattern] | None = None,
        statistics: bool | Iterable[UserStatistic] = True,
        histogram: bool = True,
        tensor_budget: int | str = DEFAULT_BUDGET,
        per_forward: bool = False,
        ranks: Ranks = "all",
        quiet: bool = False,
    ) -> None:
        options: dict[str, Any] = {
            "sites": _keep(sites),
            "schedule": choose_schedule(schedule, every),
            "tensors": _keep(tensors),
            "statistics": _keep(statistics),
            "histogram": histogram,
            "tensor_budget": tensor_budget,
            "per_forward": per_forward,
        }
        Settings(**options)  # what is wrong with them is said here, not when training begins
        read_ranks(ranks := _keep(ranks))
        self._record: Callable[..., Recording] = partial(record, ranks=ranks, **options)
        self._path = None if path is None else os.fspath(path)
        self._quiet = quiet
        self._used: set[str] = set()
        self._state: Mapping[str, Any] | None = None
        self._ending: weakref.finalize[[Recording, Status], TrainedRun] | None = None
        self._critical: list[Finding] = []
        self._alerted: set[str] = set()
        self.recording: Recording | None = None
        self.findings: Findings | None = None

    @property
    def finding_counts(self) -> dict[str, float]:
        """The number of findings of each severity, for the trainer's own log: ``retrograd/critical`` …"""
        found = [each.severity for each in self.findings or ()]
        return {f"retrograd/{severity}": float(found.count(severity)) for severity in SEVERITIES}

    @property
    def is_recording(self) -> bool:
        """True while a recording goes on."""
        return self._ending is not None

    def _begin(self, model: nn.Module, step: int | None = None, share: Share = keep_own, *, is_new: bool) -> None:
        """Begin to record.

        Args:
            model: what is trained.
            step: the step that begins; None where updates are counted.
            share: gives all processes what the first one has.
            is_new: the trainer begins anew; else it goes on where the state says that the recording was.
        """
        self._end(self._abandoned)  # the trainer has been left without a word
        path, goes_on = share(self._find_place(type(model).__name__, is_new=is_new))
        self.recording = recording = self._record(model, path, resume=(self._state or False) if goes_on else False)
        for part in _find_parts(model):
            recording.add_root(part)
        if step is not None:
            recording.begin_step(step)
        self._used.add(str(recording.path))
        self.findings = None
        self._critical, self._alerted = [], set()
        is_said = not self._quiet and ask_rank() == 0
        LiveFindings(recording.events, partial(_take, self._critical, is_said=is_said))
        self._ending = weakref.finalize(self, _leave, recording, self._abandoned)
        self._ending.atexit = False  # which may come too late, behind that of the writer
        atexit.register(self._ending)
        if is_said:
            say(f"recording to {path}")

    def _find_place(self, name: str, *, is_new: bool) -> tuple[str, bool]:
        """The folder, and whether the recording there goes on."""
        if not is_new and self._state is not None:
            place = str(self._state["path"])
            if self._path is not None and DATE not in self._path and str(Path(place).absolute()) not in self._used:
                place = self._path  # the user's word is above that of a checkpoint
            if is_run(open_folder(place)):
                return place, True
        first = name_folder([name]) if self._path is None else self._path
        if ask_rank() == 0:  # the others are told
            first = make_dated(first)
        return next(place for place in _number(first) if str(Path(place).absolute()) not in self._used), False

    def _end(self, status: Status = "finished", error: BaseException | None = None) -> bool:
        """End the recording, if there is one; returns whether there was."""
        if self._ending is None or self.recording is None:
            return False
        atexit.unregister(self._ending)
        self._ending.detach()
        self._ending = None
        _close(self.recording, status, error)
        return True

    def _tell(self) -> None:
        """Find what is wrong with the run that has ended, and print it. To be called in the first process."""
        assert self.recording is not None
        assert self.recording.path is not None
        try:
            with random_kept():
                self._explain(self.recording.path)
        except Exception as error:  # training has ended well, whatever we have to say of it
            say(f"what is wrong with {self.recording.path}, if anything, is not known: {error!r}")

    def _explain(self, path: Path) -> None:
        run = open_run(path)
        history = run.history
        self.findings = find_and_store(run) if history.rows.count <= LIMITS.explained_rows else None
        if not self._quiet:
            steps = count_recorded(history.manifest.get("overhead"), len(history.loss.steps))
            done = f"{steps} at {count_of(len(history.sites), 'site')}"
            say(f"recorded {done}{tell_verdict(self.findings, os.path.relpath(path))}")

    def _take_numbers(self, numbers: Mapping[str, Any], step: int | None = None) -> None:
        """Record what the trainer logs, where it is a number."""
        if self.recording is not None and self.is_recording:
            for name, number in numbers.items():
                with suppress(ScalarError):
                    self.recording.log({name: number}, step=step)

    def _log_critical(self, log: Log, boards: Callable[[], Iterable[Board]], step: int) -> None:
        """Log what was found to be critical since the last call. To be called in the first process, between steps.

        Args:
            log: the trainer's own way to log numbers.
            boards: gives what its loggers write to.
            step: the step for the log.
        """
        if len(self._critical) > len(self._alerted):
            new = [each for each in self._critical if each.detector not in self._alerted]
            self._log(log, {"retrograd/critical": float(len(self._critical))}, boards, new, step)

    def _log_findings(self, log: Log, boards: Callable[[], Iterable[Board]], step: int) -> None:
        """Log what was found at the end, which has been told, if anything was; as :meth:`_log_critical`."""
        if self.findings:
            self._log(log, self.finding_counts, boards, self.findings, step)

    def _log(
        self,
        log: Log,
        numbers: dict[str, float],
        boards: Callable[[], Iterable[Board]],
        findings: Sequence[Finding],
        step: int,
    ) -> None:
        alerts = [each for each in findings if each.severity == "critical" and each.detector not in self._alerted]
        self._alerted.update(each.detector for each in alerts)
        try:
            with random_kept():
                log(numbers)
                for board in boards():
                    write_text(board, findings, step)
                    for each in alerts:
                        send_alert(board, each)
        except Exception as error:  # training goes on, whatever becomes of what we have to say
            say(f"the trainer's log did not take the findings: {error!r}")

    def _make_state(self) -> dict[str, Any]:
        """State for the trainer's checkpoint; empty before anything was recorded."""
        if self._ending is not None and self.recording is not None:
            return {"path": str(self.recording.path), **self.recording.state_dict()}
        return dict(self._state or {})

    def _take_state(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state) if "path" in state and "step" in state else None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"recording": None, "_ending": None, "_critical": [], "_alerted": set()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end("finished" if error is None else "failed", error)


def _take(found: list[Finding], finding: Finding, *, is_said: bool) -> None:
    found.append(finding)
    if is_said:
        say_critical(finding)


def _keep(given: T) -> T | tuple[Any, ...]:
    """What can be gone through once only, kept for the next time."""
    return tuple(given) if isinstance(given, Iterator) else given


def _number(path: str) -> Iterator[str]:
    """``runs/first``, ``runs/first-2``, ``runs/first-3`` …"""
    yield path
    number = 2
    while True:
        yield f"{path}-{number}"
        number += 1


def _find_parts(model: nn.Module) -> Iterator[nn.Module]:
    """The parts that a trainer's own step may call instead of the model: what it holds, and what its lists hold."""
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _find_parts(child)
        elif next(child.parameters(), None) is not None:
            yield child


def _close(recording: Recording, status: Status, error: BaseException | None) -> None:
    if error is None:
        recording.close(status)
    else:
        recording.__exit__(type(error), error, error.__traceback__)


def _leave(recording: Recording, status: Status) -> None:
    """End a recording whose callback is gone, or whose process ends."""
    _close(recording, status, find_exception())
