"""The sink of a rank whose rows go into one folder with those of the others.

What belongs to one rank stays with it: tensors that are kept, files of other kinds, faults, and the exception that
ended it are written to a folder of its own, which is made when there is something to write. What every rank notes
alike, such as its calls and updates, only rank 0 keeps.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

from retrograd.core.addresses import call_at_end, open_folder
from retrograd.core.errors import RunError
from retrograd.core.history.copies import Disagreement
from retrograd.core.history.sink import UPDATES, Event, EventKind, KeptTensor, Moment, RowBatch
from retrograd.core.merging.below import News
from retrograd.core.merging.holdings import Parcel
from retrograd.core.merging.links import NoteBoard
from retrograd.core.merging.node import MergingNode
from retrograd.core.merging.own_rows import OwnRows
from retrograd.core.merging.rows import count_from_begin, unrank_rows
from retrograd.core.notices import Notices, warn
from retrograd.core.runs.ending import describe_exception, find_exception
from retrograd.core.runs.layout import rank_name
from retrograd.core.runs.ledger import Ledger, read_ledgers
from retrograd.core.runs.placements import Placements
from retrograd.core.runs.queue import Unwritten, WriteQueue
from retrograd.core.runs.ranks import ask_rank
from retrograd.core.runs.writer import RunWriter, outlive_forks

_OWN_EVENTS: frozenset[EventKind] = frozenset(
    {"fault", "dropped", "overwritten", "error", "trigger", "nonfinite", "overwrite", "shared", "finding"}
)
"""Events that a rank writes itself; of all others those of rank 0 tell."""

_STEP_SECONDS = 30.0


class SharedRun:
    """A sink that hands its rows to the rank that merges them, and is a run writer for all else.

    Args:
        path: the run folder.
        processes: how many ranks there are.
        find_board: asks for the board by which they find each other.
        has_tensors: tensors are to be kept, in a folder of this rank.
        resume: as of a run writer.
        step: as of a run writer.
        join: as of a run writer.
        tensor_budget: as of a run writer.
        queue_bytes: what may wait to be merged.

    Attributes:
        path: the run folder.
        next_step: the step where it begins.

    Raises:
        RunExistsError, RunWriteError, DamagedRunError: as of a run writer, on rank 0.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        processes: int,
        find_board: Callable[[], NoteBoard | None],
        *,
        has_tensors: bool = False,
        resume: bool = False,
        step: int | None = None,
        join: bool = False,
        tensor_budget: int = 1 << 30,
        queue_bytes: int = 256 << 20,
    ) -> None:
        self.path = open_folder(path)
        self.rank = ask_rank()
        self._choices: dict[str, Any] = {"resume": resume, "step": step, "tensor_budget": tensor_budget}
        self._join = join
        self._opening = threading.RLock()
        self._notices = Notices()
        self._facts: dict[str, Any] = {}
        self._writer: RunWriter | None = None
        self._lost = Unwritten()
        self._is_open = True
        self._numbers = 0
        self._own = OwnRows(WriteQueue(queue_bytes))
        run = hashlib.sha256(os.fsencode(str(self.path))).hexdigest()[:16]
        if self.rank == 0:
            self.next_step = self._open_writer().next_step
            if resume:
                _post_step(find_board(), run, self.next_step)
        else:
            if has_tensors or (self.path / rank_name(self.rank)).is_dir():  # what a session before this one left
                self._try_writer()
            self.next_step = step or (_await_step(find_board(), run) if resume else 0)
        self._node = MergingNode(self.rank, processes, run, self._own, find_board, self._open_top)
        outlive_forks(self._node.working, self._silence)
        call_at_end(self._close_at_exit, self.path)

    # ---- the sink: called by the training thread ----

    def describe(self, **facts: Any) -> None:
        """Add facts to the manifest, and tell what is held at sites."""
        if "placements" in facts:
            told = facts.pop("placements")
            self._own.placements = Placements(told["sites"], told["stages"])
        if "statistics" in facts:
            self._own.how = facts["statistics"]
        self._facts.update(facts)
        if facts.get("error") is not None:
            self._try_writer()
        if self._writer is not None:
            self._writer.describe(**facts)

    def add_sites(self, names: Sequence[str]) -> None:
        """Name the next rows."""
        self._own.names.extend(names)

    def add_rows(self, batch: RowBatch) -> None:
        """Merge rows with those of the other ranks."""
        if not self._is_open:
            return
        if not self._own.queue.add(batch):
            self._notices.warn_once(
                "queue", "More is recorded than can be merged; what finds the queue full is lost, and counted."
            )
        self._own.through = max(self._own.through, batch.moment.step)

    def add_event(self, event: Event) -> None:
        """Merge a loss with those of the other ranks; keep what else is of this one."""
        if not self._is_open:
            return
        self._own.through = max(self._own.through, event.moment.step - 1)  # its rows may be still to come
        if event.kind in UPDATES:
            self._own.updates.append(event.moment)
        if event.kind == "loss":
            self._own.losses.append((event.moment, event.value))
        elif self.rank == 0 or event.kind in _OWN_EVENTS:
            writer = self._try_writer()
            if writer is None:
                self._lost += Unwritten(events=1)
            else:
                writer.add_event(replace(event, name=self._rename(event.name)))

    def add_tensor(self, kept: KeptTensor) -> None:
        """Keep a tensor in the folder of this rank."""
        writer = self._try_writer() if self._is_open else None
        if writer is None:
            self._lost += Unwritten(tensors=1)
        else:
            kept.site = self._rename(kept.site)
            writer.add_tensor(kept)

    def add_file(self, name: str, write: Callable[[BinaryIO], None]) -> None:
        """Write a file of another kind to the folder of this rank."""
        writer = self._try_writer()
        if writer is None:
            self._lost += Unwritten(files=1)
        else:
            writer.add_file(name, write)

    def flush(self) -> None:
        """Hand on what was added; on rank 0 wait until it can be read."""
        if self._is_open:
            self._node.flush()
            if self._writer is not None:
                self._writer.flush()

    def close(self, status: str = "finished") -> None:
        """Hand on what was added, and end; rank 0 waits for the others, but not for long."""
        if not self._is_open:
            return
        self._is_open = False
        atexit.unregister(self._close_at_exit)
        if status != "finished":
            self._try_writer()
        self._node.close(is_failed=status != "finished")
        self._lost += self._own.queue.lost + Unwritten(rows=self._node.lost)
        if self._writer is not None:
            self._writer.close(status)
        if self._lost:
            self._notices.warn_once("lost", f"{self._lost} were not merged into {self.path}.")

    @property
    def sites(self) -> Sequence[str]:
        """The sites of which something was written; on other ranks than 0 those that were named."""
        return self._writer.sites if self.rank == 0 and self._writer is not None else self._own.names

    @property
    def lost(self) -> Unwritten:
        """Count of what was neither written nor handed on."""
        return self._lost + (Unwritten() if self._writer is None else self._writer.lost)

    def _rename(self, name: str) -> str:
        """The name of a site in the history of all ranks."""
        return self._own.placements.rename(name) if ":" in name else name

    # ---- the folder of this rank ----

    def _open_writer(self) -> RunWriter:
        with self._opening:
            if self._writer is None:
                join = self._join or self.rank != 0
                self._writer = RunWriter(self.path, join=join, **self._choices)
                self._writer.describe(**self._facts)
                atexit.unregister(self._close_at_exit)
                call_at_end(self._close_at_exit, self.path)  # again: what is registered last runs first
            return self._writer

    def _try_writer(self) -> RunWriter | None:
        try:
            return self._open_writer()
        except RunError as error:
            self._notices.warn_once("folder", f"What rank {self.rank} keeps for itself is lost: {error}")
            return None

    def _open_top(self, handed: int | None) -> FolderTop:
        return FolderTop(self, self._try_writer, handed)

    def count_lost(self, rows: int) -> None:
        """Count rows that could not be written."""
        self._lost += Unwritten(rows=rows)

    def say_alone(self, handed: int | None) -> None:
        """Say, once, that no rank above takes the rows of this one."""
        why = "could not be reached" if handed is None else f"was lost behind step {handed}"
        text = f"The rank that takes the rows of rank {self.rank} {why}: they go to a folder of its own."
        self._notices.warn_once("alone", text)

    def say_unread(self, error: Exception) -> None:
        """Say that it is not known what the rank before this one has written."""
        text = f"What was written of {self.path} before cannot be read ({error}): some rows may count twice."
        self._notices.warn_once("unread", text)

    def say_differing(self, found: Sequence[Disagreement]) -> None:
        """Say, once, that ranks hold copies that differ."""
        site, step, shown, other = found[0]
        text = (
            f"Ranks {shown} and {other} hold copies of {site!r} that differ from step {step} on; rank {shown} counts."
        )
        self._notices.warn_once("differing", text)

    def _silence(self) -> None:
        self._is_open = False
        self._node.silence()

    def _close_at_exit(self) -> None:
        error = find_exception()
        if error is not None:
            self.describe(error=describe_exception(error))
        self.close("finished" if error is None else "failed")


class FolderTop:
    """Writes merged rows to the folder of this rank, which is made for the first of them.

    Args:
        run: whose rows they are.
        open_writer: makes the folder; None where it cannot be made.
        handed: the last step of which rows were handed to another rank, before that was lost; None for none.
    """

    def __init__(self, run: SharedRun, open_writer: Callable[[], RunWriter | None], handed: int | None) -> None:
        self._run = run
        self._open_writer = open_writer
        self._handed = handed
        self._names: list[str] = []
        self._told: dict[str, Any] = {}
        self._writer: RunWriter | None = None
        self._ledger = Ledger()

    def add_sites(self, names: Sequence[str]) -> None:
        """Name the next rows."""
        self._names += names

    def describe_sites(self, told: dict[str, Any]) -> None:
        """Keep what ranks hold at sites."""
        self._told["placements"] = told

    def describe_ranks(self, news: News) -> None:
        """Keep whose rows are merged, who fell silent, what came too late, and whose copies differ."""
        self._told["merged"] = {
            "ranks": sorted(news.joined),
            "lost": {str(rank): step for rank, step in sorted(news.gone.items())},
            "late": sum(news.late.values()),
            "differing": {site: numbers for site, *numbers in news.differing.values()},
        }
        if news.differing:
            self._run.say_differing(list(news.differing.values()))

    def add_parcel(self, parcel: Parcel) -> None:
        """Write rows, and the means of the losses of all ranks."""
        writer = self._prepare()
        if writer is None:
            self._run.count_lost(parcel.n_rows)
            self._give_up(parcel)
            return
        for step, micro, backward, phase, n, total in parcel.losses:
            writer.add_event(Event(Moment(step, micro, backward, phase), "loss", "", total / n, str(n), time.time()))
        last = max((rows.batch.moment.micro for rows in parcel.rows), default=0)
        batches = count_from_begin([unrank_rows(rows) for rows in parcel.rows], max(last, 0))
        batches = batches or [RowBatch(Moment(parcel.when[0]), b"")]
        batches[-1] = replace(batches[-1], units=parcel.units)
        if not writer.add_merged(batches):
            self._give_up(parcel)

    def _give_up(self, parcel: Parcel) -> None:
        """Have nobody hand over again what is lost, and counted."""
        ledger = self.written.copy()
        ledger.add(parcel.units)
        self._keep(ledger)

    def _keep(self, ledger: Ledger) -> None:
        self._ledger = ledger
        if self._writer is not None:
            self._writer.keep_ledger(ledger)

    def begin(self, sessions: Collection[str]) -> Ledger:
        """Go on with what these sessions have written; returns the units in it."""
        found = Ledger(sessions)
        try:
            found.update(read_ledgers(self._run.path, sessions))
        except (OSError, RunError) as error:
            self._run.say_unread(error)
        found.update(self.written)
        self._keep(found)
        return found

    @property
    def written(self) -> Ledger:
        """The units that are in files, or lost for good."""
        written = None if self._writer is None else self._writer.ledger
        return self._ledger if written is None else written

    def flush(self) -> None:
        """Return once all of it can be read."""
        writer = self._prepare()
        if writer is not None:
            writer.flush()

    def _prepare(self) -> RunWriter | None:
        if self._writer is None:
            self._writer = self._open_writer()
            if self._writer is not None:
                self._writer.keep_ledger(self._ledger)
            if self._run.rank:
                self._run.say_alone(self._handed)
        if self._writer is not None and (self._names or self._told):
            told, self._told = self._told, {}
            names, self._names = self._names, []
            self._writer.add_sites(names)
            self._writer.describe(**told)
        return self._writer


def _post_step(board: NoteBoard | None, run: str, step: int) -> None:
    if board is not None:
        with contextlib.suppress(RuntimeError):
            board.post(f"{run}/step", str(step))


def _await_step(board: NoteBoard | None, run: str) -> int:
    """The step where rank 0 continues a run; 0 if it does not say so for long."""
    until = time.monotonic() + _STEP_SECONDS
    while board is not None and time.monotonic() < until:
        with contextlib.suppress(RuntimeError):
            if (found := board.look(f"{run}/step")) is not None and found.isdecimal():
                return int(found)
        time.sleep(0.05)
    warn("Rank 0 does not say at which step it continues the run; this rank begins at step 0.")
    return 0
