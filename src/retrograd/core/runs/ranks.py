"""The folder of a run that belongs to this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from retrograd.core.addresses import bounded, is_refusal
from retrograd.core.errors import CallError, RunError, RunExistsError, RunWriteError
from retrograd.core.files import UNFINISHED, refuse_link
from retrograd.core.foreign.text import read_json
from retrograd.core.ranks.processes import ask_rank, is_one_of_several
from retrograd.core.runs.attempts import name_attempt, read_attempt
from retrograd.core.runs.dated import DATE
from retrograd.core.runs.layout import (
    LOCK,
    MANIFEST,
    MERGED,
    RANK_FILE,
    STATISTICS,
    TENSORS,
    is_extra,
    list_parts,
    list_rank_folders,
    list_shards,
    parse_rank,
    rank_name,
)
from retrograd.core.runs.lock import Lock, is_locked, is_open_file, open_lock
from retrograd.core.runs.manifest import read_manifest

_ADMISSION_SECONDS = 10.0


class RankClaim:
    """A process's hold on its rank's folder.

    Scripts that spawn processes tell their rank only after a while, so the claim may move to another folder.

    Args:
        run: the run folder; made if it is not there.
        resume: continue the rank that is there.
        join: the folder was made for all processes of this launch, so it may hold what others wrote. That of an
            attempt at the same work, whose process is gone, is taken over.
        step: where what such an attempt has recorded is continued; None where it is not, and set aside.

    Raises:
        RunExistsError: the folder holds another run, or other files.
        RunWriteError: it cannot be made or written.
    """

    def __init__(self, run: Path, *, resume: bool = False, join: bool = False, step: int | None = None) -> None:
        self.run = run
        self.is_continued = self.is_taken_over = False
        self._join, self._step = join, step
        self._mark: int | None = None
        try:
            self.folder, self._lock = self._enter(resume=resume)
        except RunError:
            raise
        except Exception as error:
            if not is_refusal(error):
                raise
            raise RunWriteError(
                f"The run folder {str(run)!r} cannot be written: {getattr(error, 'strerror', None) or error}.",
                repair="give a folder that can be created, on a disk with room.",
            ) from error

    @property
    def rank(self) -> int:
        """The rank that the folder stands for."""
        return parse_rank(self.folder.name) or 0

    @property
    def is_extra(self) -> bool:
        """True if the rank's own folder was taken."""
        return is_extra(self.folder.name)

    def settle(self) -> bool:
        """Go to the folder of the rank as it is known by now, if nobody has it.

        Where the folder was removed meanwhile it is made again, unless somebody else has begun a run there.

        Returns:
            Whether it was made again.

        Raises:
            RunExistsError: somebody else has.
            OSError: it cannot be made.
        """
        is_lost = not self._lock.is_of(self.folder / LOCK)
        if is_lost:
            self._lock.release()
            self.folder, self._lock = self._enter()
        self.move()
        return is_lost

    def move(self) -> None:
        """Go to the folder of the rank as it is known by now, if nobody has it."""
        target = self.run / rank_name(ask_rank())
        if target == self.folder or target.exists():
            return
        with _admit(self.run):
            if not target.exists():
                self.folder.rename(target)  # the lock is on the open file, and moves along
                self.folder = target

    def release(self) -> None:
        """Let go of the folder."""
        self._lock.release()
        self._forget()

    def _enter(self, *, resume: bool = False) -> tuple[Path, Lock]:
        self.run.mkdir(parents=True, exist_ok=True)
        with _admit(self.run):
            is_same = self._mark is not None and is_open_file(self._mark, self.run / LOCK)
            check_vacant(self.run, resume=resume, join=self._join or is_same)
            if not is_same:
                self._forget()
                self._mark = open_lock(self.run / LOCK, os.O_RDONLY)
            return self._take(ask_rank(), resume)

    def _forget(self) -> None:
        if self._mark is not None:
            os.close(self._mark)
            self._mark = None

    def _take(self, rank: int, resume: bool) -> tuple[Path, Lock]:
        folder = refuse_link(self.run / rank_name(rank))
        is_there = _was_written(folder)
        earlier = read_attempt(folder) if is_there and self._join and not resume else None
        is_ours = earlier is not None and name_attempt().follows(earlier)
        if not is_there or resume or is_ours:
            folder.mkdir(exist_ok=True)
            lock = Lock(folder / LOCK)
            if lock.acquire():
                if is_ours and self._step is None and _holds_record(folder):
                    lock.release()
                    folder.rename(self._name_aside(folder))
                    return self._take(rank, resume)
                self.is_continued, self.is_taken_over = is_there, is_ours
                return folder, lock
        extra = self._name_aside(folder)
        extra.mkdir()
        lock = Lock(extra / LOCK)
        lock.acquire()
        return extra, lock

    def _name_aside(self, folder: Path) -> Path:
        """A folder for what is not part of the run's history."""
        extra = self.run / f"{folder.name}.p{os.getpid()}"
        while os.path.lexists(extra):
            extra = extra.with_name(extra.name + "0")
        return extra


@contextlib.contextmanager
def _admit(run: Path) -> Iterator[None]:
    """Let one process in after the other; who waits for too long goes ahead."""
    lock = Lock(run / LOCK)
    lock.acquire(_ADMISSION_SECONDS)
    try:
        yield
    finally:
        lock.release()


def is_held_here(run: Path) -> bool:
    """Return whether a process of this machine records to this folder."""
    return any(is_locked(folder / LOCK) for folder in list_rank_folders(run))


def check_dated(path: str | os.PathLike[str], *, resume: bool = False) -> None:
    """Make sure that a path with ``{date}``, which is a new folder each time, can be one.

    Raises:
        CallError: it is to be resumed, or written by several ranks.
    """
    name = os.fspath(path)
    if DATE in name and resume:
        raise CallError(
            f"{name!r} is a new folder each time, so nothing can be gone on with.", repair="give the folder of a run."
        )
    if DATE in name and is_one_of_several():
        raise CallError(
            f"{name!r} could be another folder on each rank.",
            repair="give all ranks one name, or have `retrograd run` choose it: retrograd run torchrun … train.py.",
            reason="each takes its own time.",
        )


@bounded
def check_vacant(run: Path, *, resume: bool = False, join: bool = False) -> None:
    """Make sure that a run may be written to this folder.

    Raises:
        RunExistsError: it holds a run that is over, or other files.
    """
    if not run.is_dir():
        return
    folders = list(filter(_was_written, list_rank_folders(run)))
    is_merged = any((folder / MERGED).is_dir() for folder in folders)  # else the manifest need not be read
    if is_merged and "compacted" in read_manifest(run / MANIFEST):
        raise RunExistsError(
            f"{str(run)!r} holds a run whose ranks were merged by `retrograd compact`.",
            repair="give another folder.",
            reason="rows of single ranks cannot be added to merged ones.",
        )
    if folders or (run / MANIFEST).exists():
        if not (resume or join or is_held_here(run)):
            raise RunExistsError(
                f"{str(run)!r} already holds a run.",
                repair=f'name a new one each time, "{run}-{DATE}", or go on with that run (resume=True, --resume).',
                reason="two runs in one folder could not be distinguished.",
            )
        return
    others = [path.name for path in run.iterdir() if not _is_ours(path)]
    if others:
        raise RunExistsError(
            f"{str(run)!r} holds other files, {others[0]!r} among them.",
            repair="give a new or an empty folder.",
            reason="what is recorded must not mix with files of another kind.",
        )


def _was_written(folder: Path) -> bool:
    """Return whether a run was written there: the ring of last events alone is not a run."""
    return (folder / LOCK).exists()


def _holds_record(folder: Path) -> bool:
    """Return whether more was recorded there than what precedes the rows of the first step."""
    losses = 0
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        losses = int(read_json(folder / RANK_FILE)["events"]["loss"])
    return losses > 1 or bool(list_parts(folder / STATISTICS) or list_shards(folder / TENSORS))


def _is_ours(path: Path) -> bool:
    return path.name == LOCK or path.name.startswith(UNFINISHED) or parse_rank(path.name) is not None
