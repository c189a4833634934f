"""A rank in the tree: its thread takes rows of this process and of the ranks below, merges them, and hands them on.

There is no collective, so nobody can wait for a rank that does not come. Rows go to the first rank above that can be
reached; a rank that reaches none is the top of its part of the tree, and writes.

What was handed on is not kept, so a rank that is killed costs what it held: its own rows since it last handed some on,
and those of ranks below that it had not handed on yet.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from retrograd.foreign.text import check_kinds
from retrograd.history.copies import Disagreement
from retrograd.history.sink import Moment, RowBatch
from retrograd.merging.links import Door, NoteBoard, Peer, RankLink
from retrograd.merging.messages import Message, pack, pack_rows, read_losses, unpack_rows
from retrograd.merging.rows import LossMeans, RankedRows, RowMerger, rank_rows, unrank_rows
from retrograd.merging.sites import SharedSites, read_groups
from retrograd.merging.tree import find_ancestors, find_children, find_span
from retrograd.notices import warnings_kept
from retrograd.runs.placements import Placements
from retrograd.runs.queue import WriteQueue

HANDING_SECONDS = 1.0
"""How often rows are handed on."""
JOINING_SECONDS = 30.0
"""So long a rank waits, from its beginning, for one above to be there, and for those below to come."""
HOLDING_SECONDS = 20.0
"""So long the rows of a step wait for ranks that are behind."""
HOLDING_BYTES = 64 << 20
"""And so many at most."""
ENDING_SECONDS = 30.0
"""So long the end waits for ranks below."""
_FAILING_SECONDS = 3.0
_LOOKING_SECONDS = 5.0
_HASTE_SECONDS = 3.0
_HEAD = {
    "through": int,
    "joined": list[int],
    "done": list[int],
    "gone": dict[str, int],
    "differing": list[list[Any]],
}


class Top(Protocol):
    """Where rows go that go no further."""

    def add_sites(self, names: Sequence[str]) -> None:
        """Name the next rows."""

    def add_rows(self, batch: RowBatch) -> None:
        """Keep rows."""

    def add_loss(self, moment: Moment, value: float) -> None:
        """Keep the mean of losses."""

    def describe_sites(self, told: dict[str, Any]) -> None:
        """Keep what ranks hold at sites."""

    def describe_ranks(self, joined: Sequence[int], lost: Mapping[int, int], differing: Sequence[Disagreement]) -> None:
        """Keep whose rows are merged, who fell silent behind which step, and whose copies differ."""

    def flush(self) -> None:
        """Return once all of it can be read."""


@dataclass
class OwnRows:
    """What this process has recorded and the thread has not taken yet.

    Attributes:
        queue: rows.
        names: of its sites, in the order of its numbers.
        losses: since they were last taken.
        placements: what it holds at its sites.
        how: how users' statistics merge, by name.
        through: all rows of earlier steps have been added.
    """

    queue: WriteQueue
    names: list[str] = field(default_factory=list)
    losses: deque[tuple[Moment, float]] = field(default_factory=deque)
    placements: Placements = field(default_factory=Placements)
    how: Mapping[str, str] = field(default_factory=dict)
    through: int = 0


class MergingNode:
    """One rank's part in merging.

    Args:
        rank, processes: this one, of how many.
        run: what tells the run from others of the same program.
        own: what this process records.
        find_board: asks for the board, which is not there before the processes have met.
        open_top: makes what takes the rows where they can be handed to nobody, given the step up to which they were.

    Attributes:
        lost: how many rows could be handed to nobody, and found no room to wait.
    """

    def __init__(
        self,
        rank: int,
        processes: int,
        run: str,
        own: OwnRows,
        find_board: Callable[[], NoteBoard | None],
        open_top: Callable[[int | None], Top | None],
    ) -> None:
        self.rank = rank
        self._processes = processes
        self._run_key = run
        self._own = own
        self._find_board = find_board
        self._open_top = open_top
        self._sites = SharedSites(processes)
        self._merger = RowMerger(self._sites, find_span(rank, processes))
        self._losses = LossMeans()
        self._codes = np.zeros(0, np.int64)
        self._stages: dict[str, int] | None = None
        self._placed: object = None
        self._board: NoteBoard | None = None
        self._door: Door | None = None
        self._link: RankLink | None = None
        self._top: Top | None = None
        self._named = 0
        self._told = -1
        self._above = find_ancestors(rank)
        self._was_linked = False
        self._began = time.monotonic()
        self._deadline = self._began + JOINING_SECONDS
        self._held_since = self._began
        self._handed: int | None = None
        self._joined: set[int] = {rank}
        self._gone: dict[int, int] = {}
        self._done: set[int] = set()
        self._is_news = True
        self._differing: list[Disagreement] = []
        self._closing: float | None = None
        self._patience = ENDING_SECONDS
        self._through = 0
        self._bell = threading.Event()
        self._flushed = threading.Semaphore(0)
        self._wanted = 0
        self._working = threading.Lock()
        self.lost = 0
        if rank == 0:
            self._become_top()
        self._thread = threading.Thread(target=warnings_kept()(self._run), name="retrograd-merging", daemon=True)
        self._thread.start()

    # ---- called by the training thread ----

    def flush(self, seconds: float = ENDING_SECONDS) -> None:
        """Wait until what was added has been handed on, or written; not for other ranks."""
        self._wanted += 1
        self._ring()
        self._flushed.acquire(timeout=seconds)

    def close(self, *, is_failed: bool = False) -> None:
        """Hand on all that is left, wait for the ranks below, and end. None of it takes longer than a minute.

        Args:
            is_failed: this process fails, so those of the ranks below may be waiting for it, and are not waited for.
        """
        self._patience = _FAILING_SECONDS if is_failed else ENDING_SECONDS
        self._closing = time.monotonic()
        self._ring()
        self._thread.join(2 * ENDING_SECONDS)

    def silence(self) -> None:
        """In a forked child, whose copies of the connections must not outlive those of its parent."""
        if self._door is not None:
            self._door.close()
        if self._link is not None:
            self._link.close()

    @property
    def working(self) -> threading.Lock:
        """Held while the thread works."""
        return self._working

    def _ring(self) -> None:
        self._bell.set()
        if self._door is not None:
            self._door.ring()

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while not self._is_over():
                self._wait()
                with self._working:
                    self._work()
            with self._working:
                self._end()
        finally:
            self.silence()
            self._flushed.release(1000)

    def _wait(self) -> None:
        if self._door is None:
            self._bell.wait(0.2)
            self._bell.clear()
            return
        until = time.monotonic() + (0.2 if self._is_seeking else HANDING_SECONDS)
        wanted, closing = self._wanted, self._closing
        while (left := until - time.monotonic()) > 0:
            for peer, message in self._door.receive(left):
                with self._working:
                    self._hear(peer, message)
            if (self._wanted, self._closing) != (wanted, closing) or (closing is not None and not self._is_waited_for):
                return

    @property
    def _is_seeking(self) -> bool:
        return self._top is None and self._link is None

    def _work(self) -> None:
        wanted = self._wanted
        self._meet()
        self._reach()
        self._take_own()
        if not self._is_seeking:
            self._hand_on(is_forced=wanted > 0)
        elif self._merger.waiting > HOLDING_BYTES:
            self.lost += sum(len(rows.owners) // 4 for rows in self._merger.take((self._merger.first_step or 0) + 1))
        if wanted:
            if self._top is not None:
                self._top.flush()
            self._wanted -= wanted
            self._flushed.release(wanted)

    def _meet(self) -> None:
        """Open the door, and tell where it is, once the processes have met."""
        if self._board is not None or (board := self._find_board()) is None:
            if self._board is None and self._is_late():
                self._become_top()
            return
        span = find_span(self.rank, self._processes)
        try:
            self._door = Door(board.own_address, range(span.start + 1, span.stop))
            board.post(self._key_of(self.rank), self._door.address)
        except (OSError, RuntimeError):
            self._door = self._door or Door("127.0.0.1", range(0))
        self._board = board

    def _key_of(self, rank: int) -> str:
        return f"{self._run_key}/{rank}"

    # ---- the rank above ----

    def _reach(self) -> None:
        if self._link is not None and self._link.is_gone():
            self._lose_link()
        if self._is_seeking and self._board is not None:
            self._seek()

    def _seek(self) -> None:
        """Try to reach a rank above; where none can be reached for long enough, be the top."""
        assert self._board is not None
        is_dead = False
        try:
            address = self._board.look(self._key_of(self._above[0]))
            if address:
                self._link = RankLink(address, self.rank)
                self._told, self._was_linked = -1, True
                return
        except ConnectionRefusedError:
            is_dead = self._was_linked  # else what is on the board may be old
        except (RuntimeError, OSError):
            is_dead = False  # it may still come
        if is_dead or self._is_late():
            del self._above[0]
            self._deadline = time.monotonic() + _LOOKING_SECONDS
            if not self._above:
                self._become_top()

    def _is_late(self) -> bool:
        hurry = float("inf") if self._closing is None else self._closing + _LOOKING_SECONDS
        return time.monotonic() > min(self._deadline, hurry)

    def _lose_link(self) -> None:
        """Go to the rank above the lost one, unless that comes back."""
        if self._link is not None:
            self._link.close()
        self._link = None
        self._deadline = time.monotonic() + _LOOKING_SECONDS

    def _become_top(self) -> None:
        if self._top is None:
            self._top = self._open_top(self._handed)
            self._merger.is_top = True
            self._told, self._is_news = -1, True

    # ---- rows of this process ----

    def _take_own(self) -> None:
        own = self._own
        through = own.through  # first: all before has been added by now
        load = own.queue.take()
        self._place_own(own.placements)
        self._merger.how = {**self._merger.how, **own.how}
        if len(self._codes) < len(own.names):
            names = own.names[len(self._codes) :]
            codes = [self._sites.number(own.placements.rename(name)) for name in names]
            self._codes = np.concatenate([self._codes, np.array(codes, np.int64)])
        for batch in load.batches:
            self._merger.add(rank_rows(batch, self._codes, self._sites, self.rank))
        for _ in range(len(own.losses)):
            moment, value = own.losses.popleft()
            self._losses.add(moment.step, moment.micro, moment.backward, moment.phase, 1, value)
        self._through = through

    def _place_own(self, placements: Placements) -> None:
        if placements is self._placed:
            return
        self._placed = placements
        if self._stages != placements.stages:
            self._stages = dict(placements.stages)
            self._codes = self._codes[:0]
        for name, fact in placements.sites.items():
            spec = str(fact.get("placements", ""))
            self._sites.place(placements.rename(name), fact["holds"], spec, read_groups(fact))

    # ---- rows of ranks below ----

    def _hear(self, peer: Peer, message: Message | None) -> None:
        try:
            if message is None:
                self._miss(peer)
            else:
                self._take(peer, *message)
        except (ValueError, KeyError, TypeError, IndexError, OverflowError):  # what a stranger says
            if self._door is not None:
                self._door.drop(peer)
            self._miss(peer)

    def _take(self, peer: Peer, head: dict[str, Any], body: memoryview) -> None:
        if head["kind"] == "sites":
            peer.codes = self._sites.hear(head["sites"])
            check_kinds(head, {"how": dict[str, str]})
            self._merger.how = {**head["how"], **self._merger.how}
            return
        for rows in unpack_rows(head, body, peer.codes, self._processes):
            self._merger.add(rows)
        if "through" in head:
            check_kinds(head, _HEAD)
            for moment, n, total in read_losses(head["losses"]):
                self._losses.add(moment.step, moment.micro, moment.backward, moment.phase, n, total)
            peer.through = head["through"]
            self._join({*head["joined"], peer.rank}, {int(rank): step for rank, step in head["gone"].items()})
            self._done.update(head["done"])
            for site, *numbers in head["differing"]:
                check_kinds({"site": site, "numbers": numbers}, {"site": str, "numbers": list[int]})
                self._merger.note_difference(Disagreement(site, *numbers))
        if head.get("is_last"):
            peer.is_done = True
            peer.answer("farewell")

    def _join(self, joined: set[int], gone: dict[int, int]) -> None:
        ranks = range(self._processes)
        if not all(rank in ranks for rank in {*joined, *gone}):
            raise ValueError("there are no such ranks")
        if not joined <= self._joined or not gone.items() <= self._gone.items():
            self._joined |= joined
            self._gone.update(gone)
            self._is_news = True

    def _miss(self, peer: Peer) -> None:
        """A rank is gone."""
        if not peer.is_done and peer.rank >= 0 and not self._is_here(peer.rank):
            self._gone[peer.rank] = peer.through
            self._is_news = True

    def _is_here(self, rank: int) -> bool:
        return self._door is not None and any(each.rank == rank for each in self._door.peers)

    @property
    def _peers(self) -> list[Peer]:
        return [] if self._door is None else [peer for peer in self._door.peers if peer.rank >= 0 and not peer.is_done]

    @property
    def _missing(self) -> list[int]:
        """Ranks below that have not come yet, and may still."""
        now = time.monotonic()
        if self._closing is not None and now < self._closing + _LOOKING_SECONDS and (orphans := self._find_orphans()):
            return orphans
        if now > self._began + JOINING_SECONDS or self._board is None:
            return []
        missing = [rank for rank in find_children(self.rank, self._processes) if rank not in self._joined]
        if self._closing is not None and now > self._closing + _HASTE_SECONDS:
            missing = [rank for rank in missing if self._has_called(rank)]
        return missing

    def _find_orphans(self) -> list[int]:
        """Ranks whose rows came through one that is gone, and that have not come themselves."""
        below = {rank for gone in self._gone for rank in find_span(gone, self._processes) if rank in self._joined}
        return sorted(below - self._gone.keys() - self._done - {peer.rank for peer in self._peers})

    def _has_called(self, rank: int) -> bool:
        """Tell whether a rank has told where it is: only one that records does."""
        try:
            return self._board is not None and self._board.look(self._key_of(rank)) is not None
        except RuntimeError:
            return False

    # ---- handing on ----

    def _hand_on(self, *, is_forced: bool = False, is_last: bool = False) -> None:
        complete = self._find_complete()
        before = None if is_forced or is_last else complete
        rows = list(self._merger.take(before))
        losses = list(self._losses.take(before))
        if rows:
            self._handed = max(self._handed or 0, *(each.batch.moment.step for each in rows))
        if self._top is not None:
            self._write(self._top, rows, losses)
        elif self._link is not None:
            self._send(self._link, rows, losses, through=complete, is_last=is_last)

    def _find_complete(self) -> int:
        """Steps before this one are complete, or have been waited for long enough."""
        first = self._merger.first_step
        known = min([self._through, *(peer.through for peer in self._peers), *(0 for _ in self._missing)])
        now = time.monotonic()
        if first is None or first < known:
            self._held_since = now
        is_too_long = now > self._held_since + HOLDING_SECONDS or self._merger.waiting > HOLDING_BYTES
        if first is not None and is_too_long:
            self._held_since = now
            return max(known, self._through)
        return known

    @property
    def _is_waited_for(self) -> bool:
        """Tell whether ranks below are still to be waited for."""
        if self._closing is None:
            return True
        return time.monotonic() < self._closing + self._patience and bool(self._peers or self._missing)

    def _write(self, top: Top, rows: Sequence[RankedRows], losses: Sequence[Any]) -> None:
        if self._told != self._sites.version:
            self._told = self._sites.version
            top.add_sites(self._sites.names[self._named :])
            self._named = len(self._sites.names)
            top.describe_sites(self._sites.describe(self.rank))
        differing = list(self._merger.differing.values())
        if self._is_news or differing != self._differing:
            self._is_news, self._differing = False, differing
            top.describe_ranks(sorted(self._joined), self._gone, differing)
        for each in rows:
            top.add_rows(unrank_rows(each))
        for step, micro, backward, phase, n, total in losses:
            top.add_loss(Moment(step, micro, backward, phase), total / n)

    def _send(
        self, link: RankLink, rows: Sequence[RankedRows], losses: Sequence[Any], *, through: int, is_last: bool
    ) -> None:
        head: dict[str, Any] = {
            "through": through,
            "losses": losses,
            "joined": sorted(self._joined),
            "done": sorted(self._done | ({self.rank} if is_last else set())),
            "gone": {str(rank): step for rank, step in self._gone.items()},
            "differing": list(self._merger.differing.values()),
            "is_last": is_last,
        }
        sent = 0
        try:
            if self._told != self._sites.version:
                link.send(pack("sites", sites=self._sites.tell(), how=self._merger.how))
                self._told = self._sites.version
            for frame, count in pack_rows(rows, **head):
                link.send(frame)
                sent += count
            losses = ()
            if is_last:
                next(link.receive(), None)
        except (OSError, ValueError):
            self._lose_link()
            for each in rows[sent:]:  # half a frame is none
                self._merger.add(each)
            for loss in losses:
                self._losses.add(*loss)

    # ---- the end ----

    def _is_over(self) -> bool:
        return self._closing is not None and not self._is_waited_for and not self._is_seeking

    def _end(self) -> None:
        self._take_own()
        self._hand_on(is_last=True)
        while self._is_seeking and self._merger.waiting:
            self._reach()
            if self._is_seeking:
                time.sleep(0.2)
            else:
                self._hand_on(is_last=True)
