"""Writes a run folder while a model trains: the sink of a recorder that was given a path.

The training thread only appends to a queue. One background thread takes what is there every two seconds, decodes
it, and writes it as files that appear whole; so a killed process loses at most what was added since. What cannot be
written, since the disk is full, say, waits in the queue and is tried again.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from retrograd.core.addresses import call_at_end, is_refusal, is_remote, open_folder
from retrograd.core.errors import RunError, RunWriteError
from retrograd.core.files import SpareFiles, make_storable
from retrograd.core.history.sink import Event, KeptTensor, RowBatch
from retrograd.core.limits import LIMITS
from retrograd.core.notices import Notices, warnings_kept
from retrograd.core.ranks.processes import ask_rank
from retrograd.core.runs.chosen_ranks import ChosenRanks
from retrograd.core.runs.dated import make_dated
from retrograd.core.runs.ending import describe_exception, find_exception
from retrograd.core.runs.layout import MANIFEST
from retrograd.core.runs.manifest import Manifest
from retrograd.core.runs.queue import Load, Unwritten, WriteQueue, count_rows
from retrograd.core.runs.rank_folder import RankFolder
from retrograd.core.runs.ranks import RankClaim, is_held_here
from retrograd.core.spent import note_spent

if TYPE_CHECKING:
    from retrograd.core.runs.upload import Put, Upload

_LAST_PAUSES = (0.1, 0.4, 1.0)
"""Seconds between what is tried at the end, when a disk does not take what is left."""
_LONGEST_PAUSE = 10.0
_REMOTE_SECONDS = 30.0
"""Each request to a store costs money and some 50 ms."""

_FORK_SECONDS = 5.0

_silencers: list[tuple[weakref.ref[threading.Lock], weakref.WeakMethod[Callable[[], None]]]] = []
_held: list[threading.Lock] = []


class RunWriter:
    """A sink that writes a run folder.

    Once training goes on it raises nothing: what cannot be written, though it was tried until there was no more room
    to wait, is lost, counted in ``rank.json`` and the manifest, and said once as a
    :class:`retrograd.core.errors.RetrogradWarning`. After a fork the child's copy is silent.

    Args:
        path: the run folder: new, or empty. It stays the same if the program changes its directory. What goes to an
            address is written to a folder below ``runs`` first (:mod:`retrograd.core.runs.upload`).
        resume: continue the run that is there, if there is one.
        step: where it begins anew: what is recorded of this step or later is removed first. None keeps all.
        join: the folder was made for all processes of this launch, so others may have written to it. An earlier
            attempt at the same work is continued at ``step``, and set aside where that is None.
        chosen: the ranks that record; the lowest of them writes the manifest.
        tensor_budget: bytes that tensor files may take, never passed.
        flush_seconds: how often to write; every two seconds by default, and every thirty into object storage.
        queue_bytes: what may wait to be written, besides tensors: of these, as much as files may take.

    Attributes:
        path: the run folder, or the address.
        folder: the run folder on this machine.
        next_step: where it begins: ``step``, else one more than the last step that is recorded.

    Raises:
        RunExistsError: the folder holds another run, or other files.
        RunWriteError: it cannot be made or written.
        DamagedRunError: the run to continue cannot be read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        resume: bool = False,
        step: int | None = None,
        join: bool = False,
        chosen: ChosenRanks = ChosenRanks(),  # noqa: B008  # it cannot change
        tensor_budget: int = 1 << 30,
        flush_seconds: float | None = None,
        queue_bytes: int = 256 << 20,
    ) -> None:
        path = make_dated(os.fspath(path))
        self.path = self.folder = open_folder(path)
        is_far = is_remote(self.path)
        self.flush_seconds = flush_seconds or (_REMOTE_SECONDS if is_far else LIMITS.flush_seconds)
        self._queue = WriteQueue(queue_bytes, max(queue_bytes, tensor_budget))
        self._lost = Unwritten()
        self._notices = Notices()
        self._is_joined = join
        self._first_rank = chosen.first
        there: Put = {}
        if is_far:
            from retrograd.core.runs.upload import local_folder_of, prepare

            self.folder = local_folder_of(path)
            if not is_held_here(self.folder):
                there = prepare(self.path, self.folder, ask_rank(), resume=resume or join)
        self._upload: Upload | None = None
        self._claim = RankClaim(self.folder, resume=resume, join=join, step=step)
        try:
            self._folder = RankFolder(
                self._claim,
                step=step,
                tensor_budget=tensor_budget,
                max_waiting=queue_bytes,
                count_added=lambda: self._queue.added,
            )
            self._manifest = Manifest(self.folder / MANIFEST, resume=self._claim.is_continued)
            if self._claim.is_continued or not chosen.are_all:
                self._manifest.describe(chosen.describe())
            self._folder.write_status("running", self._lost)
            self._write_manifest()
        except BaseException as error:
            self._claim.release()
            if is_refusal(error) and not isinstance(error, RunError):
                raise RunWriteError(
                    f"The run folder {str(path)!r} cannot be written: {error}.",
                    repair="give a folder on a disk that has room and may be written.",
                ) from error
            raise
        self.next_step = self._folder.next_step if step is None else step
        self._is_open = True
        if is_far:
            from retrograd.core.runs.upload import Upload

            self._upload = Upload(self.folder, self.path, there, self._find_rank_folder)
        self._status = "running"
        self._has_ended = False
        self._failures = 0
        self._files: dict[str, Callable[[BinaryIO], None]] = {}
        self._writing = threading.Lock()
        self._spare = SpareFiles()
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=warnings_kept()(self._run), name="retrograd-writer", daemon=True)
        outlive_forks(self._writing, self._silence)
        call_at_end(self._close_at_exit, self.path)
        self._thread.start()

    # ---- the sink: called by the training thread ----

    def describe(self, **facts: Any) -> None:
        """Add facts to the manifest; ``placements``, ``error`` and ``attempt``, all of this process, to its rank."""
        if "placements" in facts:
            self._folder.place(facts.pop("placements"))
        self._folder.error = facts.pop("error", self._folder.error)
        self._folder.attempt = facts.pop("attempt", self._folder.attempt)
        self._manifest.describe(facts)

    def add_sites(self, names: Sequence[str]) -> None:
        """Name the next rows."""
        self._folder.names.add_rows(list(map(make_storable, names)))

    def add_rows(self, batch: RowBatch) -> None:
        """Write rows with the next flush."""
        self._add(batch)

    def add_event(self, event: Event) -> None:
        """Write an event with the next flush."""
        self._add(event)

    def add_tensor(self, kept: KeptTensor) -> None:
        """Write a tensor with the next flush, unless training overwrites it before."""
        self._add(kept)

    def add_file(self, name: str, write: Callable[[BinaryIO], None]) -> None:
        """Write a file of another kind beside what is recorded; returns when it is there, if the disk takes it."""
        if self._is_open:
            with self._writing:
                self._files[name] = write
                if self._attempt(self._settle):
                    self._write_files()

    def flush(self) -> None:
        """Write all that was added, and return when it can be read.

        A store that does not answer is waited for a minute; until it has answered, another flush waits for nothing.
        """
        if self._is_open:
            self._write_all(is_paused=_is_waiting)
            if self._upload is not None:
                self._upload.wait(LIMITS.last_words_seconds)

    def close(self, status: str = "finished") -> None:
        """Write all that was added, and end. Calling it twice is harmless.

        A store that does not answer is waited for a minute, and then left to the thread that asks it.
        """
        if not self._is_open:
            return
        self._status = status
        self._is_open = False
        atexit.unregister(self._close_at_exit)
        self._closing.set()
        self._wake.set()
        self._thread.join()
        if not self._has_ended:  # the thread has died of something that nobody has thought of
            self._write_last()
        if self.lost:
            self._notices.warn_once("lost", f"{self.lost} were not written to {self.folder}.")
        if self._upload is not None:
            self._upload.end(LIMITS.last_words_seconds)

    @property
    def sites(self) -> Sequence[str]:
        """The sites of which something was written; all that were named before anything was."""
        return self._folder.sites

    @property
    def lost(self) -> Unwritten:
        """Count of rows, events, tensors and files that were not written, and never will be."""
        return self._queue.lost + self._lost + Unwritten(tensors=self._folder.shards.lost)

    def _add(self, item: RowBatch | Event | KeptTensor) -> None:
        if not self._is_open:
            return
        if not self._queue.add(item):
            self._notices.warn_once(
                "queue", "More is recorded than can be written; what finds the queue full is lost, and counted."
            )
        elif self._queue.is_half_full:
            self._wake.set()

    def _find_rank_folder(self) -> tuple[Path, bool]:
        """The folder of this process, and whether it writes the manifest."""
        return self._claim.folder, self._claim.rank == 0 and not self._claim.is_extra

    # ---- the writer thread ----

    def _run(self) -> None:
        if self._claim.rank == self._first_rank:
            self._manifest.find_git()
        while self._is_open:
            self._wake.wait(self.flush_seconds)
            self._wake.clear()
            if self._failures:  # and what is more than half full does not ask a full disk at once again
                self._closing.wait(min(self.flush_seconds * 2 ** min(self._failures, 8), _LONGEST_PAUSE))
            if self._is_open:
                self._write_all(is_paused=_is_not_waiting)
                note_spent()
        self._write_last()

    def _write_last(self) -> None:
        self._spare.free()
        for pause in _LAST_PAUSES:
            if self._write_all(is_paused=_is_waiting, status=self._status):
                break
            time.sleep(pause)
        else:
            self._write_all(is_paused=_is_waiting, status=self._status, is_last=True)
        self._claim.release()
        self._has_ended = True

    def _write_all(self, *, is_paused: Callable[[], bool], status: str = "running", is_last: bool = False) -> bool:
        """Write what waits, while training does too or not; returns whether nothing is left to be tried again."""
        with self._writing:
            load = self._queue.take()
            self._attempt(partial(self._folder.copy_tensors, load.tensors))
            load.events += self._folder.take_news()
            is_new = bool(load)
            left, is_done = load, False
            if is_ours := self._attempt(self._settle):
                left, is_done = self._write_load(load, is_paused=is_paused)
            self._queue.put_back(left)
            if is_last:
                self._give_up()
            if is_ours:
                is_told = is_new or is_paused() or self._upload is not None  # there this tells that it still runs
                is_done &= self._write_about(status if is_told else None)
            self._failures = 0 if is_done else self._failures + 1
            self._complain_of(load)
            if self._upload is not None:
                self._upload.ask()
            return is_done

    def _settle(self) -> None:
        if self._folder.settle():
            self._notices.warn_once(
                "removed", f"Of {self.folder} something was removed or renamed. It is made again, without what it held."
            )

    def _write_load(self, load: Load, *, is_paused: Callable[[], bool]) -> tuple[Load, bool]:
        """Write each kind by itself; returns what has to wait, and whether all else is written."""
        left = Load()
        is_placed = self._attempt(self._folder.write_placements)  # before the rows that they speak of
        is_done = self._attempt(lambda: self._folder.shards.write(is_paused=is_paused()))
        load.events += self._folder.take_news()
        lost = Unwritten(events=len(load.events))
        if load.events and not self._attempt(partial(self._folder.write_events, load.events), lost):
            left.events = load.events
        lost = Unwritten(rows=sum(map(count_rows, load.batches)))
        if load.batches and not self._attempt(partial(self._folder.write_rows, load.batches), lost):
            left.batches = load.batches
        return left, is_placed & is_done & self._write_files() and not left

    def _write_files(self) -> bool:
        for name, write in list(self._files.items()):
            if self._attempt(partial(self._folder.write_file, name, write), Unwritten(files=1)):
                del self._files[name]
        return not self._files

    def _write_about(self, status: str | None) -> bool:
        """Write the status, and merge small files; a status of None was written already."""
        is_done = self._attempt(self._folder.tidy)
        if status is not None:
            is_done &= self._attempt(partial(self._folder.write_status, status, self.lost))
        return is_done & self._attempt(self._write_manifest)

    def _give_up(self) -> None:
        self._queue.give_up()
        self._folder.shards.give_up()
        self._lost += Unwritten(files=len(self._files))
        self._files.clear()

    def _write_manifest(self) -> None:
        if self._claim.rank == self._first_rank and not self._claim.is_extra:
            self._manifest.name_sites(self._folder.sites)
            if self.lost:
                self._manifest.describe({"lost": self.lost.tell()})
            self._manifest.write()

    def _attempt(self, write: Callable[[], None], lost: Unwritten | None = None) -> bool:
        """Do this; False if the system refuses it, so that it is to be tried again. What fails otherwise is lost."""
        try:
            write()
        except Exception as error:  # no fault of ours may end the thread, or the user's training
            if not is_refusal(error):
                self._lost += lost or Unwritten()
                text = f"What was recorded cannot be written to {self.folder}: {error!r}. It is lost."
                self._notices.warn_once("fault", text)
                return True
            what = getattr(error, "strerror", None) or getattr(error, "problem", f"{error!r}")
            self._notices.warn_once(
                "disk",
                f"{self.folder} cannot be written: {what}. Training goes on; what is recorded waits until it can, and "
                "is lost when there is too much of it.",
            )
            return False
        return True

    def _complain_of(self, load: Load) -> None:
        if load.batches and self._claim.is_extra and not self._is_joined:  # of a launch the last line tells
            self._notices.warn_once(
                "second",
                f"Another process is rank {self._claim.rank} of the run {self.path}. What this one records goes to "
                f"{self._claim.folder.name}, and is not part of the run's history.",
            )
        if self._folder.shards.dropped:
            self._notices.warn_once(
                "budget",
                f"The budget of {self._folder.shards.budget:,} bytes for tensors is spent; no more are written.",
            )

    def _silence(self) -> None:
        """In a forked child: write nothing, and leave the parent's lock alone."""
        self._is_open = False
        self._spare.free()
        self._claim.release()
        if self._upload is not None:
            self._upload.silence()

    def _close_at_exit(self) -> None:
        if not self._is_open:
            return
        error = find_exception()
        if error is not None:
            self.describe(error=describe_exception(error))
        self.close("finished" if error is None else "failed")


# ---- forks: none in the middle of a write, and silence in the child ----


def _is_waiting() -> bool:
    return True


def _is_not_waiting() -> bool:
    return False


def outlive_forks(writing: threading.Lock, silence: Callable[[], None]) -> None:
    """Hold ``writing`` while this process forks, and call ``silence``, a method, in the child.

    A library that is caught in the middle of its work in another thread may hold locks that nobody will release
    in the child.
    """
    _silencers.append((weakref.ref(writing), weakref.WeakMethod(silence)))


def _hold_writers() -> None:
    for reference, _ in _silencers:
        writing = reference()
        if writing is not None and writing.acquire(timeout=_FORK_SECONDS):
            _held.append(writing)


def _release_writers() -> None:
    while _held:
        _held.pop().release()


def _silence_writers() -> None:
    _release_writers()
    for _, method in _silencers:
        silence = method()
        if silence is not None:
            silence()
    _silencers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_writers, after_in_parent=_release_writers, after_in_child=_silence_writers)
