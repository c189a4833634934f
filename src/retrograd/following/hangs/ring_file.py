"""The file that a ring of last events lies in: made, and read from outside.

A process writes to it while this is read, may hang, or may have died at any moment; so nothing in it is taken for
granted. Loads without torch.

A ring file is a header, and then a *lane* for each thread that has run nodes: what passes the thread is in, and its
last events, each at the place that its count modulo the capacity gives. An entry's count is written last: an entry
that a dead process left half-written has the count of the entry that it was to replace. Names stand in a text file
beside it, one a line, and the modules that sequence numbers belong to in another.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrograd.core.errors import TraceError
from retrograd.core.files import write_whole
from retrograd.core.foreign.text import expect_file
from retrograd.core.runs.layout import RING, is_run, list_rank_folders, parse_rank, rank_name
from retrograd.core.runs.lock import start_of
from retrograd.following.hangs.rank_state import RankState, RingEvent, State, ThreadPosition

NAMES = "ring.names"
MODULES = "ring.modules"

VERSION = 1
MAGIC = b"rg-ring\n"
HEADER = struct.Struct("<8sIIIIQQQQ128s")
"""Magic, version, rank, lanes, capacity, pid, start of the process, made at (ns), closed at (ns), host."""

HEADER_SIZE = 256
LANE = struct.Struct("<9Q")
"""Thread's number, that of the operating system, id of its name, passes that it is in, number of the outermost or
last one, count at which that began, when (ns), when the last one ended (ns), whether that failed."""

LANE_SIZE = 128
ENTRY = struct.Struct("<4Q")
"""When (ns), sequence number or number of the pass, name and state and depth, count."""

NO_NUMBER = 2**64 - 1
"""Sequence number of the nodes of leaves."""

NODE, BEGINS, ENDS, FAILED, BACK = 1, 2, 3, 4, 5
"""States: a node begins; a pass begins, ends, fails; a node goes on after a pass inside of it."""

_STATES: dict[int, State] = {
    NODE: "node",
    BACK: "node",
    BEGINS: "pass begins",
    ENDS: "pass ends",
    FAILED: "pass failed",
}
_MOST_LANES = 1024
_MOST_SPANS = 4096
_LARGEST_FILE = 1 << 30
_LARGEST_TEXT = 1 << 28


def read_rings(run: Path | str, last: int = 64) -> list[RankState]:
    """Read what each process of a run was last seen at, whether it runs, hangs or is dead.

    Args:
        run: a run folder.
        last: how many events of each thread to read.

    Returns:
        The states in the order of ranks. One whose file cannot be read says so in its ``fault``.

    Raises:
        TraceError: there is no ring in this folder.
    """
    run = Path(run)
    folders = [folder for folder in list_rank_folders(run) if (folder / RING).exists()]
    if not folders:
        recorded = "`retrograd run` writes statistics, and no ring: " if is_run(run) else ""
        raise TraceError(
            f"{str(run)!r} holds no ring of events.",
            repair=f"{recorded}run the script as `retrograd trace`, or call rg.watch_hangs(folder) in it, and give "
            "that folder; to see how a recorded run is doing, use `retrograd view`.",
        )
    return sorted((_read_folder(folder, last) for folder in folders), key=lambda state: state.rank)


def read_ring(path: Path, last: int = 64) -> RankState:
    """Read one ring file.

    Args:
        path: the file.
        last: how many events of each thread to read.

    Raises:
        TraceError: it is not there, or it is damaged beyond reading.
    """
    try:
        with expect_file(path).open("rb") as file:
            content = file.read(_LARGEST_FILE)
    except OSError as error:
        raise TraceError(f"{str(path)!r} cannot be read: {error.strerror or error}.") from error
    made = _check(content, str(path))[7]
    return parse_ring(content, _read_names(path.with_name(NAMES), made), read_modules(path), path=path, last=last)


def parse_ring(
    content: bytes | bytearray | memoryview,
    names: Sequence[str],
    modules: Sequence[tuple[int, int, str]],
    *,
    path: Path | None = None,
    last: int = 64,
) -> RankState:
    """Make sense of a ring's bytes.

    Args:
        content: the bytes.
        names: its names by their ids.
        modules: first and last sequence number of module calls, and their names.
        path: where it lies.
        last: how many events of each thread to read.

    Raises:
        TraceError: these are not the bytes of a ring.
    """
    _, _, rank, lanes, capacity, pid, started, _, closed, host = _check(content, str(path))
    name = host.rstrip(b"\0").decode("utf-8", "replace")
    threads = [_parse_lane(content, index, capacity, names, modules, last) for index in range(lanes)]
    return RankState(
        rank=rank,
        pid=pid,
        host=name,
        path=path,
        read=time.time_ns(),
        alive=is_alive(pid, started) if name == platform.node() else None,
        closed=closed,
        threads=tuple(thread for thread in threads if thread is not None),
    )


def choose_folder(run: Path, rank: int) -> Path:
    """The folder of a rank's ring; one beside it where a living process writes a ring for that rank already."""
    folder = run / rank_name(rank)
    if not _is_taken(folder):
        return folder
    extra = run / f"{folder.name}.p{os.getpid()}"
    while _is_taken(extra):
        extra = extra.with_name(extra.name + "0")
    return extra


def _is_taken(folder: Path) -> bool:
    """Return whether a living process writes a ring there."""
    try:
        state = read_ring(folder / RING, last=1)
    except TraceError:
        return False
    return not state.closed and state.alive is not False


def map_ring(folder: Path | None, header: tuple[Any, ...], size: int, first: str) -> Any:
    """Make the memory of a ring, in a file unless there is no folder.

    Args:
        folder: where the files lie.
        header: what the ring begins with.
        size: bytes.
        first: the first line of the file of names.
    """
    if folder is None:
        memory = bytearray(size)
        HEADER.pack_into(memory, 0, *header)
        return memory
    with write_whole(folder / NAMES) as file:
        file.write(f"{first}\n".encode())
    with contextlib.suppress(FileNotFoundError):
        (folder / MODULES).unlink()
    with write_whole(folder / RING) as file:  # a file that is in use elsewhere is not cut off
        content = bytearray(size)
        HEADER.pack_into(content, 0, *header)
        file.write(content)  # zeros too: a disk that is full later would kill the process
    with (folder / RING).open("r+b") as file:
        return mmap.mmap(file.fileno(), size)


def size_of(lanes: int, capacity: int) -> int:
    """Bytes of a ring."""
    return HEADER_SIZE + lanes * lane_size(capacity)


def lane_size(capacity: int) -> int:
    """Bytes of one of its lanes."""
    return LANE_SIZE + capacity * ENTRY.size


def is_alive(pid: int, started: int) -> bool:
    """Return whether the process with this number on this machine is the one that began then."""
    if started:
        return start_of(pid) == started
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def read_modules(path: Path) -> list[tuple[int, int, str]]:
    """The module calls that stand beside a ring file; lines that make no sense are left out."""
    found = []
    for line in _read_lines(path.with_name(MODULES)):
        first, _, rest = line.partition(" ")
        last, _, name = rest.partition(" ")
        if first.isdecimal() and last.isdecimal() and max(len(first), len(last)) <= 20:
            found.append((int(first), int(last), name))
    return found[-_MOST_SPANS:]


def first_line(made: int) -> str:
    """The first line of a file of names, so that it is not taken for that of another ring."""
    return f"names of ring {made}"


def _read_folder(folder: Path, last: int) -> RankState:
    path = folder / RING
    try:
        return read_ring(path, last)
    except TraceError as error:
        rank = parse_rank(folder.name) or 0
        return RankState(rank, 0, "", path, time.time_ns(), None, 0, (), fault=error.problem)


def _check(
    content: bytes | bytearray | memoryview, where: str
) -> tuple[bytes, int, int, int, int, int, int, int, int, bytes]:
    if len(content) < HEADER_SIZE or bytes(content[: len(MAGIC)]) != MAGIC:
        raise TraceError(f"{where!r} is not a ring of events, or its beginning is lost.")
    header = HEADER.unpack_from(content)
    _, version, _, lanes, capacity = header[:5]
    if version > VERSION:
        raise TraceError(f"{where!r} was written by a later version of retrograd.", repair="update retrograd.")
    if not 0 < lanes <= _MOST_LANES or capacity & (capacity - 1) or not capacity:
        raise TraceError(f"{where!r} is damaged: {lanes} threads with {capacity} events each make no sense.")
    if len(content) < size_of(lanes, capacity):
        raise TraceError(f"{where!r} is cut off: {len(content)} of {size_of(lanes, capacity)} bytes are there.")
    return header


def _parse_lane(
    content: bytes | bytearray | memoryview,
    index: int,
    capacity: int,
    names: Sequence[str],
    modules: Sequence[tuple[int, int, str]],
    last: int,
) -> ThreadPosition | None:
    start = HEADER_SIZE + index * lane_size(capacity)
    ident, native, name, depth, passes, first, begun, ended, failed = LANE.unpack_from(content, start)
    if not ident:
        return None
    entries = memoryview(content)[start + LANE_SIZE : start + lane_size(capacity)].cast("Q")
    newest = _newest(entries, capacity)
    events = []
    for count in range(max(1, newest - min(last, capacity - 1) + 1), newest + 1):
        event = _parse_entry(entries, count, capacity, names, modules)
        if event is not None:
            events.append(event)
    return ThreadPosition(
        ident=ident,
        native=native,
        name=_name(names, name),
        depth=depth,
        passes=passes,
        node=max(newest - first, 0) if depth else 0,
        begun=begun,
        ended=ended,
        failed=bool(failed),
        events=tuple(events),
    )


def _newest(entries: memoryview, capacity: int) -> int:
    """The largest count that stands where it belongs; 0 if there is none."""
    counts: list[int] = entries[3::4].tolist()
    newest = max(counts)
    if counts[newest % capacity] == newest:
        return newest
    return max((count for place, count in enumerate(counts) if count % capacity == place), default=0)


def _parse_entry(
    entries: memoryview, count: int, capacity: int, names: Sequence[str], modules: Sequence[tuple[int, int, str]]
) -> RingEvent | None:
    at = count % capacity * 4
    moment, number, what, found = entries[at : at + 4].tolist()
    state = _STATES.get(what >> 32 & 0xFF)
    if found != count or state is None:
        return None
    if state != "node":
        return RingEvent(state, "", number, moment, what >> 40, count)
    module = find_module(modules, number)
    return RingEvent(
        state, _name(names, what & 0xFFFFFFFF), number if number != NO_NUMBER else None, moment, 0, count, module
    )


def find_module(modules: Sequence[tuple[int, int, str]], number: int) -> str | None:
    """The innermost module call that a sequence number belongs to."""
    fitting = [span for span in modules if span[0] <= number < span[1]]
    return min(fitting, key=lambda span: span[1] - span[0])[2] if fitting else None


def _name(names: Sequence[str], number: int) -> str:
    return names[number] if 0 < number < len(names) else "?"


def _read_names(path: Path, made: int) -> list[str]:
    names = _read_lines(path)
    return names if names[:1] == [first_line(made)] else []


def _read_lines(path: Path) -> list[str]:
    """The lines of a text file that were written to their ends."""
    try:
        with expect_file(path).open("rb") as file:
            content = file.read(_LARGEST_TEXT)
    except OSError:
        return []
    return content.decode("utf-8", "replace").split("\n")[:-1]
