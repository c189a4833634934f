"""A tree of ranks in one process: their real sinks, nodes, messages and writer, but no sockets, threads or training.

Each rank is a :class:`retrograd.core.merging.shared_run.SharedRun`. What it would say to a socket goes into a wire in
memory, and its node works when it is told to, so the CPU time and the bytes of every rank can be told apart.
"""

from __future__ import annotations

import gc
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq

from reading import invent_rows, name_sites, place
from retrograd.core.history.sink import Event, Moment, RowBatch
from retrograd.core.merging import above, node, shared_run
from retrograd.core.merging.links import Peer
from retrograd.core.merging.messages import Frames, Message
from retrograd.core.merging.node import MergingNode
from retrograd.core.merging.shared_run import SharedRun
from retrograd.core.merging.tree import find_children
from retrograd.core.runs import writer
from retrograd.core.runs.layout import STATISTICS, rank_name
from retrograd.core.runs.writer import RunWriter

CHECKED = ("blocks.0.fc:output", "blocks.0.fc:weight")
"""Sites whose merged numbers are checked: one of which each rank holds its own, and one of copies."""
NEVER = 1e9
"""Seconds between flushes by the writer's own thread: here it is told when to write."""
EXPONENT_BINS = 255


class Wire:
    """Bytes on their way in one direction: the socket of who speaks.

    Attributes:
        sent: how many there were at all.
    """

    def __init__(self) -> None:
        self._waiting: list[bytes] = []
        self.sent = 0

    def send(self, spoken: bytes) -> int:
        self._waiting.append(bytes(spoken))
        self.sent += len(spoken)
        return len(spoken)

    def take(self) -> bytes:
        waiting, self._waiting = self._waiting, []
        return b"".join(waiting)


class WireLink:
    """What stands for a :class:`retrograd.core.merging.links.RankLink`."""

    def __init__(self, door: WireDoor, rank: int, told: dict[str, Any]) -> None:
        self.up, self.down = Wire(), Wire()
        self._frames = Frames()
        peer = Peer(self.down)  # type: ignore[arg-type]
        peer.rank, peer.address = rank, told["door"]
        door.wires[peer] = self.up
        door.greet(peer, told)
        self._said: list[dict[str, Any]] = []
        self.welcome, *self._said = self.receive()

    def send(self, frame: bytes) -> None:
        self.up.send(frame)

    def receive(self) -> list[dict[str, Any]]:
        with_welcome, self._said = self._said, []
        return [*with_welcome, *(head for head, _ in self._frames.add(self.down.take()))]

    def close(self) -> None:
        """Nothing is open."""


class WireDoor:
    """What stands for a :class:`retrograd.core.merging.links.Door`."""

    def __init__(self, address: str, greet: Callable[[Peer, dict[str, Any]], None]) -> None:
        self.address = address
        self.greet = greet
        self.wires: dict[Peer, Wire] = {}

    @property
    def peers(self) -> list[Peer]:
        return list(self.wires)

    def receive(self, _seconds: float) -> Iterator[tuple[Peer, Message]]:
        for peer, wire in self.wires.items():
            for message in peer.frames.add(wire.take()):
                yield peer, message

    def drop(self, peer: Peer) -> None:
        """Raise: nobody here says anything that cannot be read.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"what rank {peer.rank} says cannot be read")

    def ring(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is open."""


class Hall:
    """The board of addresses, the doors behind these, and the links between."""

    own_address = "here"

    def __init__(self) -> None:
        self._notes: dict[str, str] = {}
        self._doors: dict[str, WireDoor] = {}
        self.links: dict[int, WireLink] = {}

    def post(self, key: str, text: str) -> None:
        self._notes[key] = text

    def look(self, key: str) -> str | None:
        return self._notes.get(key)

    def open_door(self, _host: str, _ranks: range, greet: Callable[[Peer, dict[str, Any]], None]) -> WireDoor:
        address = f"door {len(self._doors)}"
        door = self._doors[address] = WireDoor(address, greet)
        return door

    def connect(self, address: str, rank: int, **told: Any) -> WireLink:
        link = self.links[rank] = WireLink(self._doors[address], rank, told)
        return link


class SteppedNode(MergingNode):
    """A rank's part in merging, whose thread ends at once: it works when it is told to."""

    def _run(self) -> None:
        """Leave it to :meth:`take_turn`."""

    def take_turn(self) -> None:
        """What the thread does between two waits."""
        for peer, message in self._below.door.receive(0.0) if self._below.door is not None else ():
            self._hear(peer, message)
        self._work()

    @property
    def unwritten(self) -> int:
        """How many units of its own it does not know to be written."""
        return len(self._own.units.kept)


class Tree:
    """Ranks that merge what is invented for them.

    Args:
        folder: of their run; it must not be there.
        ranks: how many.
        n_sites: how many sites each has; at least five.
        has_histograms: rows have histograms.

    Attributes:
        cpu: rank → CPU seconds of each step.
        writing: CPU seconds of each flush, in which rank 0 writes.
    """

    def __init__(self, folder: Path, ranks: int, n_sites: int, *, has_histograms: bool = True) -> None:
        self.folder, self.ranks = folder, ranks
        self.sites = name_sites(n_sites)
        self._has_histograms = has_histograms
        self._hall = Hall()
        self._expected: dict[tuple[str, int], dict[str, Any]] = {}
        self.cpu: dict[int, list[float]] = defaultdict(list)
        self.writing: list[float] = []
        with self._in_the_hall():
            self._sinks = [self._open(rank) for rank in range(ranks)]
            self._nodes: list[SteppedNode] = [sink._node for sink in self._sinks]  # type: ignore[misc]
            for each in self._nodes:  # who is above comes first, so that each finds it
                each.take_turn()
        self._writer: RunWriter = self._sinks[0]._writer  # type: ignore[assignment]

    @contextmanager
    def _in_the_hall(self) -> Iterator[None]:
        with (
            patch.object(node, "Door", self._hall.open_door),
            patch.object(above, "RankLink", self._hall.connect),
            patch.object(shared_run, "MergingNode", SteppedNode),
            patch.object(writer, "PAUSE", NEVER),
        ):
            yield

    def _open(self, rank: int) -> SharedRun:
        with be_rank(rank):
            sink = SharedRun(self.folder, self.ranks, lambda: self._hall)
        sink.describe(placements=place(self.sites, self.ranks, rank), processes=self.ranks)
        sink.add_sites(self.sites)
        return sink

    def train(self, steps: range) -> None:
        """Have all ranks record and hand on these steps, one after the other, and write them at the end."""
        invented = [invent_rows(steps, self.sites, rank) for rank in range(self.ranks)]
        for at, step in enumerate(steps):
            for rank, sink in enumerate(self._sinks):
                rows, bins = (each[at] for each in invented[rank])
                sink.add_rows(self._make_batch(step, rows, bins))
                sink.add_event(Event(Moment(step), "loss", value=1 / (1 + step + rank), time=float(step)))
                sink.add_event(Event(Moment(step), "update", "SGD", step + 1.0, time=float(step)))
            self._expect(step, [rows[at] for rows, _ in invented], [bins[at] for _, bins in invented])
            self.sweep()
        self.write()

    def _make_batch(self, step: int, rows: np.ndarray, bins: np.ndarray) -> RowBatch:
        if not self._has_histograms:
            rows["bins"] = 0
        return RowBatch(Moment(step, 0, 0), rows.tobytes(), bins.tobytes() if self._has_histograms else b"")

    def sweep(self) -> None:
        """Let each rank work once, the lowest branches first: what is complete comes to the top."""
        gc.disable()  # a rank by itself would not look through the objects of all
        for rank in range(self.ranks - 1, -1, -1):
            began = time.thread_time()
            self._nodes[rank].take_turn()
            self.cpu[rank].append(time.thread_time() - began)
        gc.enable()

    def write(self) -> None:
        """Have rank 0 write what has come."""
        began = time.process_time()
        self._writer.flush()
        self.writing.append(time.process_time() - began)

    def count_bytes(self) -> tuple[list[int], list[int]]:
        """Bytes that each rank has sent upwards, and has been told from above."""
        links = [self._hall.links.get(rank) for rank in range(self.ranks)]
        return [link.up.sent if link else 0 for link in links], [link.down.sent if link else 0 for link in links]

    def end(self) -> None:
        """Hand on the last step, and close the run.

        Raises:
            AssertionError: something was lost, or numbers are not those of the ranks added up.
        """
        for each in self._sinks:
            each._own.through += 1  # as the first row of a next step would
        self.sweep()
        self.write()
        for _ in range(4):  # what is written is told from rank to rank
            self.sweep()
        lost = [rank for rank, each in enumerate(self._nodes) if each.unwritten]
        if lost:
            raise AssertionError(f"ranks {lost[:10]} do not know all of their rows to be written")
        for each in self._sinks:
            each.close()
        self._check()

    # ---- an oracle: all ranks' rows added up by numpy ----

    def _expect(self, step: int, rows: Sequence[np.ndarray], bins: Sequence[np.ndarray]) -> None:
        for site in CHECKED:
            at = self.sites.index(site)
            of = range(1) if site.endswith(":weight") else range(self.ranks)
            self._expected[site, step] = add_up(
                np.array([rows[rank][at] for rank in of]), np.array([bins[rank][at] for rank in of])
            )

    def _check(self) -> None:
        table = pq.ParquetDataset(self.folder / rank_name(0) / STATISTICS).read()
        found = [row for row in table.to_pylist() if row["site"] in CHECKED]
        if len(found) != len(self._expected):
            raise AssertionError(f"there are {len(found)} rows of {CHECKED}, not {len(self._expected)}")
        for row in found:
            expected = self._expected[row["site"], row["step"]]
            histogram = np.zeros(EXPONENT_BINS, np.int64)
            if self._has_histograms:
                histogram[row["first_bin"] : row["first_bin"] + len(row["bins"])] = row["bins"]
                np.testing.assert_array_equal(histogram, expected["bins"], err_msg=row["site"])
            for name in ("calls", "count", "zeros", "min", "max"):
                np.testing.assert_array_equal(row[name], expected[name], err_msg=f"{row['site']} {name}")
            for name in ("sum", "m2", "abs_sum"):
                np.testing.assert_allclose(row[name], expected[name], rtol=1e-9, err_msg=f"{row['site']} {name}")

    @property
    def n_checked(self) -> int:
        """How many rows were held against the oracle."""
        return len(self._expected)

    # ---- what ranks are ----

    def group_ranks(self) -> dict[str, list[int]]:
        """Ranks that have alike to do, by what they are called."""
        groups: dict[str, list[int]] = {"below all": [], "in between": [], "in between, next to the top": []}
        children = {rank: find_children(rank, self.ranks) for rank in range(self.ranks)}
        for rank in range(1, self.ranks):
            is_next = any(children[each] for each in children[rank])
            name = "in between, next to the top" if is_next else "in between" if children[rank] else "below all"
            groups[name].append(rank)
        return {name: group for name, group in groups.items() if group} | {"rank 0": [0]}


def add_up(rows: np.ndarray, bins: np.ndarray) -> dict[str, Any]:
    """What rows of one site and step come to; ``m2`` by the squares about the mean of all, in long doubles."""
    n, sums = rows["count"].astype(np.longdouble), rows["sum"].astype(np.longdouble)
    mean = sums.sum() / n.sum()
    found: dict[str, Any] = {name: rows[name].sum() for name in ("calls", "count", "zeros", "abs_sum")}
    found["sum"] = float(sums.sum())
    found["m2"] = float((rows["m2"] + n * (sums / n - mean) ** 2).sum())
    found["min"], found["max"] = rows["min"].min(), rows["max"].max()
    found["bins"] = np.zeros(EXPONENT_BINS, np.int64)
    for row, stretch in zip(rows, bins, strict=True):
        found["bins"][row["first_bin"] : row["first_bin"] + len(stretch)] += stretch
    return found


def write_alone(folder: Path, n_sites: int, blocks: Sequence[range], *, has_histograms: bool = True) -> None:
    """Write what one rank records of these steps, as it does where ranks are not merged."""
    sites = name_sites(n_sites)
    alone = RunWriter(folder, flush_seconds=NEVER)
    alone.add_sites(sites)
    for steps in blocks:
        rows, bins = invent_rows(steps, sites, 0)
        if not has_histograms:
            rows["bins"] = 0
        for at, step in enumerate(steps):
            stretches = bins[at].tobytes() if has_histograms else b""
            alone.add_rows(RowBatch(Moment(step, 0, 0), rows[at].tobytes(), stretches))
            alone.add_event(Event(Moment(step), "loss", value=1 / (1 + step), time=float(step)))
        alone.flush()
    alone.close()


class Sizes(NamedTuple):
    """Bytes of a run folder.

    Attributes:
        rows: columns of its part files.
        tails: what else is in part files, such as their schema, and the ledger; small files become one as a run grows.
        once: all other files.
    """

    rows: int
    tails: int
    once: int


def size_of(folder: Path) -> Sizes:
    """Add up the files of a run."""
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    parts = [pq.read_metadata(path) for path in sizes if path.suffix == ".parquet"]
    groups = [part.row_group(number) for part in parts for number in range(part.num_row_groups)]
    rows = sum(group.column(at).total_compressed_size for group in groups for at in range(group.num_columns))
    in_parts = sum(size for path, size in sizes.items() if path.suffix == ".parquet")
    return Sizes(rows, in_parts - rows, sum(sizes.values()) - in_parts)


@contextmanager
def be_rank(rank: int) -> Iterator[None]:
    with patch.dict(os.environ, {"RANK": str(rank)}):
        yield
