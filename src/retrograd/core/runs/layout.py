"""How a run folder is laid out: the name of everything in it, which folders are runs, and which run is the newest.

The columns of its tables are in :mod:`retrograd.core.history.table`. The page of documentation about run folders is
made from the two.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from retrograd.core.addresses import bounded, is_remote, list_names, reaching
from retrograd.core.amounts import count_of
from retrograd.core.errors import NotARunError

FORMAT = 1
"""Number of this layout; a reader refuses what has a higher one."""

MANIFEST = "manifest.json"
RANK_FILE = "rank.json"
LOCK = ".lock"

STATISTICS = "statistics"
MERGED = "merged"
EVENTS = "events"
TENSORS = "tensors"
RING = "ring.bin"
INVENTORY = "inventory.parquet"
PLACEMENTS = "placements.json"
FINDINGS = "findings.jsonl"

PARENT = Path("runs")
"""Where runs are recorded that were given no folder."""

_MAGIC = b"PAR1"
"""The last bytes of a Parquet file, behind the length of its footer."""

_PART = re.compile(r"part-(?P<first>\d{8,})-(?P<last>\d{8,})\.parquet")
_SHARD = re.compile(r"shard-(?P<number>\d{8,})\.safetensors")
_RANK = re.compile(r"rank(?P<rank>\d{5,})(?P<extra>\.p\d+)?")


@dataclass(frozen=True, slots=True)
class Place:
    """A kind of file in a run folder, with its words for people."""

    path: str
    text: str


PLACES: tuple[Place, ...] = (
    Place(
        MANIFEST,
        "what was run: versions, command, git commit, seed, model, sites; written by the lowest rank that records",
    ),
    Place(FINDINGS, "what was found wrong when this was last asked, the worst first; `retrograd explain` asks anew"),
    Place(f"rank00000/{RANK_FILE}", "how this process fares: status, first and last step, what was lost"),
    Place(f"rank00000/{PLACEMENTS}", "what this process holds at each site, and which others hold the same"),
    Place(f"rank00000/{STATISTICS}/part-00000000-00000000.parquet", "rows of statistics"),
    Place(
        f"rank00000/{MERGED}/part-00000000-00000000.parquet", "rows of all ranks, where `retrograd compact` was asked"
    ),
    Place(f"rank00000/{EVENTS}/part-00000000-00000000.parquet", "losses, updates, what rules have changed, faults"),
    Place(f"rank00000/{TENSORS}/shard-00000000.safetensors", "tensors that were asked for, several a file"),
    Place(f"rank00000/{INVENTORY}", "what autograd kept in one step, if asked for; `rg.Inventory.load()` reads it"),
    Place(f"rank00000/{RING}", "the last events of backward passes; `ring.names` and `ring.modules` give the words"),
    Place("rank00000/hang-1.txt", "what a pass was at that did not move"),
    Place(
        "rank00000.p4711/",
        "a process that found its rank taken, or an attempt that a later one of other weights has replaced; no part of "
        "the run's history, but opens by itself",
    ),
    Place(f"{LOCK}, rank00000/{LOCK}", "locks of the operating system, empty; held while a process writes"),
)


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The flushes that a part file holds, first and last."""

    first: int
    last: int

    @property
    def file_name(self) -> str:
        return f"part-{self.first:08d}-{self.last:08d}.parquet"

    def contains(self, other: Span) -> bool:
        return self.first <= other.first and other.last <= self.last


def list_parts(folder: Path) -> list[tuple[Span, Path]]:
    """Part files in order. One whose span lies inside another's was merged into that one, and is left out.

    A torn one, as a power cut leaves it, stands for no others: those that are still there are listed behind it.
    """
    found = sorted(_find_parts(folder), key=lambda part: (part[0].first, -part[0].last))
    listed: list[tuple[Span, Path]] = []
    whole: Span | None = None
    for number, (span, path) in enumerate(found):
        if whole is None or not whole.contains(span):
            listed.append((span, path))
            holds_others = number + 1 < len(found) and span.contains(found[number + 1][0])
            whole = None if holds_others and is_truncated(path) else span
    return listed


def is_truncated(path: Path) -> bool:
    """Return whether a part file on a disk ends otherwise than a Parquet file does."""
    if is_remote(path):
        return False
    if not path.is_file():  # a pipe would be waited for
        return path.exists()
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 8, 0))
            end = file.read(8)
    except FileNotFoundError:  # it was merged into a larger one meanwhile
        return False
    return end[4:] != _MAGIC or int.from_bytes(end[:4], "little") + 12 > size


def parse_span(name: str) -> Span:
    """The flushes that the file name of a part speaks of.

    Raises:
        ValueError: it is the name of something else.
    """
    match = _PART.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not a part file")
    return Span(int(match["first"]), int(match["last"]))


def list_merged_parts(folder: Path) -> list[Path]:
    """Part files that a larger one has replaced already."""
    listed = {path for _, path in list_parts(folder)}
    return [path for _, path in _find_parts(folder) if path not in listed]


def list_shards(folder: Path) -> list[tuple[int, Path]]:
    """Tensor files in order."""
    matches = ((_SHARD.fullmatch(path.name), path) for path in _list(folder))
    return sorted((int(match["number"]), path) for match, path in matches if match)


def number_file(path: Path) -> tuple[int, int]:
    """The number of a file on its disk, or when it was written, and its size: a later one of that name has others."""
    found = path.stat()
    return found.st_ino or found.st_mtime_ns, found.st_size  # stores, and some file systems, number no files


def shard_name(number: int) -> str:
    """File name of a tensor file."""
    return f"shard-{number:08d}.safetensors"


def rank_name(rank: int) -> str:
    """Folder name of a rank."""
    return f"rank{rank:05d}"


def parse_rank(name: str) -> int | None:
    """The rank that a folder name speaks of; None for any other name."""
    match = _RANK.fullmatch(name)
    return int(match["rank"]) if match else None


def is_extra(name: str) -> bool:
    """Return whether a rank folder is that of a process that found its rank taken."""
    match = _RANK.fullmatch(name)
    return bool(match and match["extra"])


def list_rank_folders(run: Path) -> list[Path]:
    """All rank folders, those of extra processes after the ranks."""
    if is_remote(run):
        found = [
            run / name for name, is_folder in list_names(run).items() if is_folder and parse_rank(name) is not None
        ]
    else:
        found = [path for path in _list(run) if parse_rank(path.name) is not None and path.is_dir()]
    return sorted(found, key=lambda path: (is_extra(path.name), path.name))


def _find_parts(folder: Path) -> list[tuple[Span, Path]]:
    return [(parse_span(path.name), path) for path in _list(folder) if _PART.fullmatch(path.name)]


def _list(folder: Path) -> list[Path]:
    if is_remote(folder):
        return [folder / name for name in sorted(list_names(folder))]
    return sorted(folder.iterdir()) if folder.is_dir() else []


@bounded
def is_run(path: Path) -> bool:
    """Return whether this is the folder of a run, or of one of its ranks."""
    with reaching(path):
        return any((path / name).is_file() for name in (MANIFEST, RANK_FILE)) or bool(list_rank_folders(path))


@bounded
def find_rank_folders(path: Path) -> list[Path]:
    """The rank folders of a run, or the folder itself where it is that of a rank.

    Raises:
        NotARunError: it is no run.
    """
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        near = "" if path.exists() else find_near_run(path)
        asked = f"did you mean {near!r}?" if near else "give the folder that a run was recorded in."
        raise NotARunError(f"{str(path)!r} {what}.", repair=asked)
    if (path / RANK_FILE).exists():
        return [path]
    folders = list_rank_folders(path)
    if not folders and not (path / MANIFEST).exists():
        runs = [] if is_remote(path) else list_runs_in(path)
        problem = f"contains no run: neither {MANIFEST} nor the folder of a rank"
        repair = "give the folder that a run was recorded in."
        if runs:
            problem = f"is a folder of {count_of(len(runs), 'run')}, not a run"
            repair = (
                f"name one, such as {str(find_latest(path))!r}; `retrograd ls {shlex.quote(str(path))}` lists them."
            )
        raise NotARunError(f"{str(path)!r} {problem}.", repair=repair)
    return folders


def find_latest(parent: Path = PARENT) -> Path:
    """The run that was written to last.

    Raises:
        NotARunError: there is no run.
    """
    written = {path: last_written(path) for path in list_runs_in(parent)}
    if not written:
        raise NotARunError(
            f"There is no run in {str(parent)!r}.", repair="name a run, or record one: `retrograd run train.py`."
        )
    return max(written, key=lambda path: (written[path], path.name))


def list_runs_in(parent: Path) -> list[Path]:
    """The runs of a folder, by name; none where there is no such folder."""
    with contextlib.suppress(OSError):
        return [path for path in sorted(parent.iterdir()) if is_run(path)]
    return []


def find_near_run(path: Path) -> str:
    """The run whose name is most like that of a folder which is not there: beside it, or where runs are recorded."""
    if is_remote(path):
        return ""
    homes = (os.path.relpath(path.parent), str(PARENT))
    known = {run.name: os.path.normpath(run) for home in reversed(homes) for run in list_runs_in(Path(home))}
    words = {name.casefold(): name for name in reversed(known)}
    near = difflib.get_close_matches(path.name.casefold(), words, n=1, cutoff=0.6)
    return known[words[near[0]]] if near else ""


@bounded
def last_written(run: Path) -> float:
    """When a run was written to last, in seconds since the epoch; 0 where that is not known."""
    found = [0.0]
    for path in (run / MANIFEST, *(folder / RANK_FILE for folder in list_rank_folders(run))):
        with contextlib.suppress(OSError):
            found.append(path.stat().st_mtime)
    return max(found)
