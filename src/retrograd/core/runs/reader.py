"""Reads a run folder, also while it is being written, and finds the record in whatever a user hands over."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from retrograd.core.addresses import bounded, is_remote, list_anew, open_folder, reaching, remembering
from retrograd.core.amounts import count_of, list_names
from retrograd.core.drawings import drawn_by
from retrograd.core.errors import DamagedRunError, NotARunError, NothingRecordedError, RunUnreachableError
from retrograd.core.foreign.text import check_kinds, read_json
from retrograd.core.guesses import Guided, names_arguments
from retrograd.core.history.ahead import read_each
from retrograd.core.history.history import History
from retrograd.core.history.names import SiteNames
from retrograd.core.history.series import Series
from retrograd.core.history.sink import Event
from retrograd.core.history.table import read_events
from retrograd.core.limits import LIMITS
from retrograd.core.runs.chosen_ranks import find_chosen, tell_chosen
from retrograd.core.runs.damage import DamagedPart, Damages
from retrograd.core.runs.event_parts import EventFiles, EventPart, LastMicroBatches
from retrograd.core.runs.layout import (
    EVENTS,
    LOCK,
    MANIFEST,
    MERGED,
    RANK_FILE,
    STATISTICS,
    TENSORS,
    find_rank_folders,
    is_extra,
    list_parts,
    number_file,
    parse_rank,
)
from retrograd.core.runs.lock import is_locked
from retrograd.core.runs.manifest import read_manifest
from retrograd.core.runs.part_outline import SiteLists
from retrograd.core.runs.parts import PartFile
from retrograd.core.runs.placements import Placements, find_copies, name_stages, read_placements
from retrograd.core.runs.stored import OpenFiles, StoredRows, StoredTensors

_ATTEMPTS = 20
_MOST_LOST = 1 << 62


PartKey = tuple[Path, int, int, int, frozenset[str] | None]
"""A part file, its number on the disk, or when it was written, its size, how many stages renamed its sites, and which
paths they share."""


@dataclass(frozen=True, slots=True)
class Rank:
    """A process of a run.

    Attributes:
        rank: its number.
        folder: where it writes.
        status: ``running``, ``finished``, ``failed``, or ``stopped`` when it died without a word.
        facts: all of its ``rank.json``.
        placements: what it holds at each site, and which ranks hold the same; empty where that is not known.
        is_extra: it found its rank taken; what it recorded is not part of the run's history. False where its folder is
            opened by itself.
    """

    rank: int
    folder: Path
    status: str
    facts: dict[str, Any]
    placements: Placements = field(default_factory=Placements)
    is_extra: bool = False


@names_arguments
def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run folder, or the folder of one of its ranks.

    Raises:
        NotARunError: there is no run in it.
        RunUnreachableError: the store that it lies in refuses to answer, or has not answered for a minute.
        DamagedRunError: a file of it cannot be read, which is more than one part of its statistics or events among
            others: these are left out with a warning. Reading the history may raise it too.
    """
    return Run(path)  # more is read of it later


class Run(Guided):
    """A run, as far as it has been written when it was opened or refreshed.

    Attributes:
        path: its folder.
        manifest: what was run.
        ranks: its processes.
        history: what was recorded, the ranks merged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = remembering(open_folder(path))
        self.history = History()
        self._damaged: list[DamagedPart] = []
        self._parts: dict[PartKey, StoredRows] = {}
        self._damages = Damages()
        self._shards = Damages()
        self._event_files = EventFiles()
        self._event_parts: dict[int, list[EventPart]] = {}
        self._names = SiteNames()
        self._lists = SiteLists(self._names.code_of)
        self._files = OpenFiles()
        self.refresh()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle its address: it is opened again."""
        return open_run, (str(self.path),)

    @property
    def status(self) -> str:
        """The status of all its processes together: the worst of theirs."""
        found = {rank.status for rank in self.ranks if not rank.is_extra} or {"stopped"}
        return next((status for status in ("failed", "running", "stopped") if status in found), "finished")

    def __repr__(self) -> str:
        extra = sum(rank.is_extra for rank in self.ranks)
        ranks = count_of(sum(not rank.is_extra for rank in self.ranks), "rank")
        also = f", and {extra} by itself" if extra else ""
        damaged = f", {count_of(len(self.damaged), 'damaged file')} left out" if self.damaged else ""
        only = f" ({chosen})" if (chosen := tell_chosen(self.manifest)) else ""
        return f"Run({str(self.path)!r}, {self.status}, {ranks}{only}{also}{damaged}, {self.history!r})"

    _repr_html_ = drawn_by("retrograd.core.views.notebook.records", "draw_run")

    def __getitem__(self, site: str) -> Series:
        """One site over time: the same as ``run.history[site]``."""
        return self.history[site]

    def refresh(self) -> None:
        """Take in what has been written since. Series and matrices that were taken before stay as they are.

        Raises:
            DamagedRunError: a file cannot be read.
            RunUnreachableError: the store that it lies in refuses to answer, or has not answered for a minute.
        """
        for _ in range(_ATTEMPTS):
            try:
                with reaching(self.path):
                    self._load()
            except NotARunError:
                raise
            except FileNotFoundError:  # the writer has just merged a file into another one
                continue
            return
        raise DamagedRunError(f"Files of {str(self.path)!r} changed while they were read.", repair="try again.")

    def _load(self) -> None:
        list_anew(self.path)
        folders = find_rank_folders(self.path)
        self.manifest = _load_manifest(self.path)
        loaded = read_each((partial(_load_rank, folder) for folder in folders), is_far=is_remote(self.path))
        self.ranks = list(loaded) if len(folders) > 1 else [replace(rank, is_extra=False) for rank in loaded]
        of_history = folders if len(folders) == 1 else [folder for folder in folders if not is_extra(folder.name)]
        ranks = {parse_rank(folder.name) or 0: folder for folder in of_history}
        ranks = dict(sorted(ranks.items()))
        placements = name_stages({rank.rank: rank.placements for rank in self.ranks if rank.folder in of_history})
        self._damaged = [*self._open_parts(ranks, placements), *self._read_events(ranks, placements)]
        shards = {rank: folder / TENSORS for rank, folder in ranks.items()}
        tensors = StoredTensors(shards, placements, lambda: self.history.few_events, self._shards, self._note)
        self.history.manifest = {**self.manifest, "status": self.status}  # first: it says how statistics merge
        lasts = LastMicroBatches(self._event_parts)
        copies = find_copies(placements, self._names.code_of, lasts)
        self.history.load(self._names, list(self._parts.values()), self._event_files.events, tensors.find, copies)

    def _note(self, found: Sequence[DamagedPart]) -> None:
        """Record shards that turned out to be damaged when tensors were asked for."""
        self._damaged += [part for part in found if part not in self._damaged]

    @property
    def damaged(self) -> list[DamagedPart]:
        """Part files that cannot be read, and are left out of the history.

        Those of tensors, and pages of statistics, are among them once they were to be read.
        """
        paths = {part.path for part in self._parts.values()}
        return [*self._damaged, *(part for part in self._damages.unreadable if part.path in paths)]

    @property
    def missing(self) -> str:
        """What is missing in it, in words: ``9,280 of 9,600 rows and 1 damaged file``; empty for nothing."""
        lost: Counter[str] = Counter()
        for rank in self.ranks:
            told = rank.facts.get("lost", {}) if not rank.is_extra else {}
            lost.update({name: int(n) for name, n in told.items() if 0 < n < _MOST_LOST})
        lost["rows"] += self.history.rows.left_out
        there = {"row": self.history.rows.count, "event": self.history.all_events.count}
        found = [
            f"{n:,} of {count_of(n + there[one], one)}" if one in there else count_of(n, one)
            for one in ("row", "event", "tensor", "file")
            if (n := lost[f"{one}s"])
        ]
        faults = self.manifest.get("faults")
        times = sum(n for n in faults.values() if isinstance(n, int)) if isinstance(faults, Mapping) else 0
        found += [count_of(len(self.damaged), "damaged file")] if self.damaged else []
        found += [f"what {count_of(times, 'fault')} kept from being recorded"] if times else []
        return list_names(found)

    def require_all(self) -> None:
        """Have what turns out to be damaged raise, and leave nothing out from now on."""
        self._damages.may_leave_out = False

    @property
    def is_compacted(self) -> bool:
        """Whether the rows of all ranks were merged into those of the first one."""
        return "compacted" in self.manifest and any((rank.folder / MERGED).is_dir() for rank in self.ranks)

    def list_statistics(self, ranks: Mapping[int, Path] | None = None) -> list[tuple[int, Path]]:
        """Part files of the history's statistics, each with its rank.

        Args:
            ranks: folders of the ranks; all that are part of the history when left out.
        """
        folders = {each.rank: each.folder for each in self.ranks if not each.is_extra} if ranks is None else ranks
        kind = MERGED if self.is_compacted else STATISTICS
        return [(rank, path) for rank, folder in folders.items() for _, path in list_parts(folder / kind)]

    @property
    def events_by_rank(self) -> dict[int, list[Event]]:
        """The few events of each process that is a part of the history, without losses and updates."""
        return {
            rank: [event for part in parts for event in read_events(part.few)]
            for rank, parts in sorted(self._event_parts.items())
        }

    def _open_parts(self, ranks: Mapping[int, Path], placements: Mapping[int, Placements]) -> list[DamagedPart]:
        """Open part files that are new, and let go of those that are gone; returns those that cannot be read."""
        first = find_chosen(self.manifest).first  # which has written the manifest
        for name in self.manifest.get("sites", ()) if first in placements else ():
            self._names.code_of.setdefault(placements[first].rename(name), len(self._names))
        parts = self.list_statistics(ranks)
        keys = _make_keys(self.path, [(path, placements[rank]) for rank, path in parts])
        listed = [(key, rank, path) for key, (rank, path) in zip(keys, parts, strict=True)]
        damages = self._damages
        new = {key: path for key, _, path in listed if key not in self._parts and key not in damages}
        calls = (partial(damages.try_to, key, partial(PartFile, path)) for key, path in new.items())
        files = read_each(calls, is_far=is_remote(self.path))
        opened = {}
        for key, rank, path in listed:
            renaming = Placements() if self.is_compacted else placements[rank]  # names are those of the history already
            part, file = self._parts.get(key), next(files) if key in new else None
            if file is not None:
                make = partial(StoredRows, path, file, self._lists, rank, renaming.rename, self._files, damages)
                part = damages.try_to(key, make)
            if part is not None:
                opened[key] = part
        self._parts = opened
        self._files.keep_only(opened.values())
        return damages.list_parts(
            [(key, path, opened[key].step_limits if key in opened else None) for key, _, path in listed]
        )

    def _read_events(self, ranks: Mapping[int, Path], placements: Mapping[int, Placements]) -> list[DamagedPart]:
        """Read part files of events that are new, by the names that sites have in the history.

        Returns:
            Those that cannot be read.
        """
        own: dict[int, dict[PartKey, tuple[Path, Placements]]] = {}
        for rank, folder in ranks.items():
            files_of_rank = [(path, placements[rank]) for _, path in list_parts(folder / EVENTS)]
            own[rank] = dict(zip(_make_keys(self.path, files_of_rank), files_of_rank, strict=True))
        listed: dict[Hashable, tuple[Path, Placements]] = {
            key: each for keys in own.values() for key, each in keys.items()
        }
        files = self._event_files
        files.load(listed, is_far=is_remote(self.path), is_growing=self.status == "running")
        read = files.parts
        self._event_parts = {rank: [read[key] for key in keys if key in read] for rank, keys in own.items()}
        return files.damages.list_parts(
            [
                (key, path, read[key].steps() if key in read and read[key].count else None)
                for key, (path, _) in listed.items()
            ]
        )


@bounded
def _make_keys(_run: Path, files: Sequence[tuple[Path, Placements]]) -> list[PartKey]:
    """For each part file of a run a key that is the same while the file is the one that was read before."""
    return [_key_of(path, placements) for path, placements in files]


def _key_of(path: Path, placements: Placements) -> PartKey:
    return path, *number_file(path), len(placements.stages), placements.shared


@bounded
def _load_manifest(path: Path) -> dict[str, Any]:
    if parse_rank(path.name) is not None:
        path = path.parent
    return read_manifest(path / MANIFEST) if (path / MANIFEST).exists() else {}


@bounded
def _load_rank(folder: Path) -> Rank:
    facts: dict[str, Any] = {}
    if (folder / RANK_FILE).exists():
        try:
            facts = read_json(folder / RANK_FILE)
            check_kinds(facts, {"status": str, "began": float, "written": float, "lost": dict[str, float]})
        except RunUnreachableError:
            raise
        except (OSError, ValueError) as error:
            raise DamagedRunError(
                f"{str(folder / RANK_FILE)!r} cannot be read: {error}.", repair="remove that file."
            ) from error
    status = str(facts.get("status", "running"))
    is_fresh = time.time() - facts.get("written", 0.0) < LIMITS.stale_seconds
    lives = is_fresh if is_remote(folder) else is_locked(folder / LOCK)
    if status == "running" and not facts.get("copied") and not lives:
        status = "stopped"
    return Rank(parse_rank(folder.name) or 0, folder, status, facts, read_placements(folder), is_extra(folder.name))


# ---- anything that holds a record ----


class Recorded(Protocol):
    """A recording, open or closed."""

    @property
    def history(self) -> History:
        """The history so far."""

    @property
    def run(self) -> Run | None:
        """The recording as a run on disk; None in memory."""


Given = Run | History | Recorded | str | os.PathLike[str]


def find_run(given: Any) -> Run | History | None:
    """The run, or the history in memory, that is meant; None for what holds nothing that was recorded.

    Raises:
        NotARunError, DamagedRunError: the folder cannot be read.
    """
    if isinstance(given, str | os.PathLike) or is_remote(given):
        return open_run(given)
    for found in (given, getattr(given, "run", None), getattr(given, "history", None)):
        if isinstance(found, Run | History):
            return found
    return None


def read_run(given: Given) -> Run | History:
    """Find the run, or the history in memory, that is meant.

    Raises:
        NothingRecordedError: it holds nothing that was recorded.
        NotARunError, DamagedRunError: the folder cannot be read.
    """
    found = find_run(given)
    if found is None:
        raise NothingRecordedError(
            f"{type(given).__name__} is not a run, a recording or a history.",
            repair="give the folder of a run, a recording of rg.record(model), or its history.",
        )
    return found


def read_history(given: Given) -> History:
    """The history of it.

    Raises:
        NothingRecordedError: it holds nothing that was recorded.
        NotARunError, DamagedRunError: the folder cannot be read.
    """
    found = read_run(given)
    return found.history if isinstance(found, Run) else found
