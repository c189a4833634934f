"""A rank in the tree: its thread takes rows of this process and of the ranks below, merges them, and hands them on.

There is no collective, so nobody can wait for a rank that does not come. Rows go to the first rank above that can be
reached; a rank that reaches none is the top of its part of the tree, and writes. A rank that is killed costs what it
had not handed on of its own; how, is said in :mod:`retrograd.core.merging.holdings`.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from retrograd.core.foreign.text import check_kinds
from retrograd.core.merging.above import LOOKING_SECONDS, RanksAbove
from retrograd.core.merging.below import RanksBelow
from retrograd.core.merging.holdings import Holdings, Parcel
from retrograd.core.merging.links import Door, NoteBoard, Peer, RankLink
from retrograd.core.merging.messages import Message, pack, pack_parcels, unpack_parcels
from retrograd.core.merging.own_rows import OwnRecord, OwnRows
from retrograd.core.merging.sites import SharedSites
from retrograd.core.merging.top import Top
from retrograd.core.merging.tree import find_span
from retrograd.core.notices import warnings_kept
from retrograd.core.runs.ledger import Ledger

HANDING_SECONDS = 1.0
"""How often rows are handed on."""
HOLDING_SECONDS = 20.0
"""So long the rows of a step wait for ranks that are behind."""
HOLDING_BYTES = 64 << 20
"""And so many at most."""
ENDING_SECONDS = 30.0
"""So long the end waits for ranks below, and for what is its own to be written."""
_FAILING_SECONDS = 3.0
_HURRY_SECONDS = 0.1
_HEIRS = 3


class MergingNode:
    """One rank's part in merging.

    Args:
        rank, processes: this one, of how many.
        run: what tells the run from others of the same program.
        own: what this process records.
        find_board: asks for the board, which is not there before the processes have met.
        open_top: makes what takes the rows where they can be handed to nobody, given the step up to which they were.

    Attributes:
        lost: how many own rows are not known to be written, at the end.
    """

    def __init__(
        self,
        rank: int,
        processes: int,
        run: str,
        own: OwnRows,
        find_board: Callable[[], NoteBoard | None],
        open_top: Callable[[int | None], Top],
    ) -> None:
        self.rank = rank
        self._processes = processes
        self._run_key = run
        self._own = OwnRecord(rank, own)
        self._find_board = find_board
        self._open_top = open_top
        self._sites = SharedSites(processes)
        self._holdings = Holdings(self._sites, find_span(rank, processes))
        self._board: NoteBoard | None = None
        self._above = RanksAbove(rank, run)
        self._below = RanksBelow(rank, processes, self._has_called)
        self._top: Top | None = None
        self._heirs: list[tuple[int, str]] = []
        self._demand = 0
        self._demanded = 0
        self._written = Ledger()
        self._is_unflushed = False
        self._named = 0
        self._told = -1
        self._news = ""
        self._handed: int | None = None
        self._held_since = time.monotonic()
        self._closing: float | None = None
        self._has_ended = False
        self._patience = ENDING_SECONDS
        self._wanted = 0
        self._flushed = threading.Semaphore(0)
        self._bell = threading.Event()
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
        if self._below.door is not None:
            self._below.door.close()
        self._above.close()

    @property
    def working(self) -> threading.Lock:
        """Held while the thread works."""
        return self._working

    def _ring(self) -> None:
        self._bell.set()
        if self._below.door is not None:
            self._below.door.ring()

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._wait()
                with self._working:
                    self._work()
            self.lost = self._own.units.unkept + sum(parcel.n_rows for parcel in self._own.units.kept)
        finally:
            self.silence()
            self._flushed.release(1000)

    def _wait(self) -> None:
        door = self._below.door
        if door is None:
            self._bell.wait(_HURRY_SECONDS if self._is_hurried else 0.2)
            self._bell.clear()
            return
        until = time.monotonic() + (_HURRY_SECONDS if self._is_hurried else HANDING_SECONDS)
        wanted, closing = self._wanted, self._closing
        while (left := until - time.monotonic()) > 0:
            for peer, message in door.receive(left):
                with self._working:
                    self._hear(peer, message)
            if (self._wanted, self._closing) != (wanted, closing):
                return

    @property
    def _is_hurried(self) -> bool:
        has_ended = any(peer.is_done or peer.is_urgent for peer in self._below.connected)
        return self._is_seeking or self._closing is not None or has_ended

    @property
    def _is_seeking(self) -> bool:
        return self._top is None and self._above.link is None

    def _work(self) -> None:
        wanted = self._wanted
        self._meet()
        is_last = self._is_last  # who has not met the others yet does not know of any to wait for
        self._reach()
        self._own.take(self._sites, self._holdings.merger)
        over = None if is_last else self._own.through
        for parcel in self._own.units.close(None if wanted else over, over=over):
            self._holdings.accept(parcel, range(self.rank, self.rank + 1))
        if not self._is_seeking:
            self._hand_on(is_forced=wanted > 0 or self._below.is_waiting, is_last=is_last)
        elif (step := self._holdings.first_step) is not None and self._holdings.merger.waiting > HOLDING_BYTES:
            list(self._holdings.take(step + 1))  # whoever has made it keeps it, and is asked for it again
        self._settle(is_flushed=wanted > 0)
        self._has_ended = is_last and not self._is_seeking
        if wanted:
            self._wanted -= wanted
            self._flushed.release(wanted)

    def _settle(self, *, is_flushed: bool) -> None:
        """Learn what is written, keep it no more, and tell those below."""
        if self._top is not None:
            if self._is_unflushed and (is_flushed or self._is_hurried):
                self._top.flush()
                self._is_unflushed = False
            self._written = self._top.written
        self._own.units.forget(self._written)
        for peer in self._below.connected:
            told = self._written, len(peer.heard_of)
            if peer.told != told:
                peer.told = told
                peer.say("written", written=self._written.tell(peer.heard_of | {peer.rank}))

    def _meet(self) -> None:
        """Open the door, and tell where it is, once the processes have met."""
        if self._board is not None or (board := self._find_board()) is None:
            if self._board is None and self._above.is_late(self._hurry):
                self._become_top()
            return
        try:
            self._below.door = Door(board.own_address, range(self.rank + 1, self._processes), self._greet)
            board.post(f"{self._run_key}/{self.rank}", self._below.door.address)
        except (OSError, RuntimeError):
            self._below.door = self._below.door or Door("127.0.0.1", range(0), self._greet)
        self._board = board

    @property
    def _hurry(self) -> float:
        return float("inf") if self._closing is None else self._closing + LOOKING_SECONDS

    def _has_called(self, rank: int) -> bool:
        try:
            return self._board is not None and self._board.look(f"{self._run_key}/{rank}") is not None
        except RuntimeError:
            return False

    # ---- the rank above ----

    def _reach(self) -> None:
        if self._above.link is not None:
            self._listen(self._above.link)
        if self._is_seeking and self._board is not None:
            door = self._below.door
            link = self._above.seek(
                self._board,
                self._hurry,
                door="" if door is None else door.address,
                sessions=sorted(self._holdings.taken.sessions),
            )
            if link is not None:
                self._told = -1
                self._obey(link.welcome)
            elif self._above.is_over:
                self._become_top()

    def _listen(self, link: RankLink) -> None:
        try:
            for head in link.receive():
                if head["kind"] == "written":
                    self._written = self._written.copy()
                    self._written.update(Ledger.read(head["written"]))
                elif head["kind"] == "heirs":
                    self._name_heirs(head["heirs"])
                elif head["kind"] == "again":
                    self._obey(head)
        except (OSError, ValueError, KeyError, TypeError, OverflowError):  # it has died, or is none of ours
            self._above.lose()

    def _obey(self, head: Mapping[str, Any]) -> None:
        """Begin again with what the rank above has."""
        try:
            check_kinds({"demand": None, **head}, {"demand": int})
            self._name_heirs(head["heirs"])
            taken = Ledger.read(head["taken"])
        except (ValueError, KeyError, TypeError, OverflowError):
            self._above.lose()
            return
        self._demanded = head["demand"]
        self._reset(taken)

    def _reset(self, taken: Ledger) -> None:
        self._holdings.reset(taken)
        for parcel in self._own.units.kept:
            self._holdings.accept(parcel, range(self.rank, self.rank + 1))
        self._demand += 1
        for peer in self._below.connected:
            self._ask(peer, "again")

    def _name_heirs(self, told: Any) -> None:
        self._above.hear(told)
        self._heirs = self._above.heirs
        for peer in self._below.connected:
            peer.say("heirs", heirs=self._heirs)

    def _become_top(self) -> None:
        if self._top is None:
            self._top = self._open_top(self._handed)
            self._holdings.merger.is_top = True
            self._told, self._news = -1, ""
            self._begin(self._holdings.taken.sessions or {secrets.token_hex(8)})

    def _begin(self, sessions: Collection[str]) -> None:
        """Go on with what these sessions have written."""
        assert self._top is not None
        self._reset(self._top.begin(sessions))

    # ---- rows of ranks below ----

    def _greet(self, peer: Peer, head: Mapping[str, Any]) -> None:
        check_kinds({"sessions": None, **head}, {"sessions": list[str]})
        if self._top is not None and not self._holdings.taken.sessions.issuperset(head["sessions"]):
            self._top.flush()
            self._begin({*self._holdings.taken.sessions, *head["sessions"]})
        self._ask(peer, "welcome")
        self._update_heirs()

    def _ask(self, peer: Peer, kind: str) -> None:
        """Have a rank send what is not in yet."""
        peer.demand, peer.through = self._demand, 0
        peer.say(kind, demand=self._demand, taken=self._holdings.taken.tell(), heirs=self._heirs)

    def _update_heirs(self) -> None:
        if self._top is None:
            return
        there = sorted((peer.rank, peer.address) for peer in self._below.connected if peer.address)
        if there[:_HEIRS] != self._heirs:
            self._heirs = there[:_HEIRS]
            for peer in self._below.connected:
                peer.say("heirs", heirs=self._heirs)

    def _hear(self, peer: Peer, message: Message | None) -> None:
        try:
            if message is not None:
                self._take(peer, *message)
                return
        except (ValueError, KeyError, TypeError, IndexError, OverflowError):  # what a stranger says
            if self._below.door is not None:
                self._below.door.drop(peer)
        self._below.miss(peer)
        self._update_heirs()

    def _take(self, peer: Peer, head: dict[str, Any], body: memoryview) -> None:
        if head["kind"] == "sites":
            peer.codes = self._sites.hear(head["sites"])
            check_kinds(head, {"how": dict[str, str]})
            self._holdings.merger.how = {**head["how"], **self._holdings.merger.how}
            return
        if head["demanded"] != peer.demand:
            return
        span = find_span(peer.rank, self._processes)
        for parcel in unpack_parcels(head, body, peer.codes, self._processes):
            peer.heard_of.update(unit.rank for unit in parcel.units)
            if not self._holdings.accept(parcel, span):
                self._demand += 1
                self._ask(peer, "again")
                return
        if head.get("is_end"):
            self._below.hear(peer, head)

    # ---- handing on ----

    def _hand_on(self, *, is_forced: bool, is_last: bool) -> None:
        complete = self._find_complete()
        parcels = list(self._holdings.take(None if is_forced or is_last else complete))
        if parcels:
            self._handed = max(self._handed or 0, *(parcel.when[0] for parcel in parcels))
        merger = self._holdings.merger
        for found in merger.differing.values():
            self._below.note_difference(found)
        if merger.late:
            self._below.news.late[self.rank] = merger.late
        if self._top is not None:
            self._write(self._top, parcels)
        elif self._above.link is not None:
            self._send(self._above.link, parcels, through=complete, is_last=is_last)

    def _find_complete(self) -> int:
        """Steps before this one are complete, or have been waited for long enough."""
        first = self._holdings.first_step
        missing = self._below.find_missing(self._closing)
        known = min([self._own.through, *(peer.through for peer in self._below.sending), *(0 for _ in missing)])
        now = time.monotonic()
        if first is None or first < known:
            self._held_since = now
        is_too_long = now > self._held_since + HOLDING_SECONDS or self._holdings.merger.waiting > HOLDING_BYTES
        if first is not None and is_too_long:
            self._held_since = now
            return max(known, self._own.through)
        return known

    def _write(self, top: Top, parcels: Sequence[Parcel]) -> None:
        if self._told != self._sites.version:
            self._told = self._sites.version
            top.add_sites(self._sites.names[self._named :])
            self._named = len(self._sites.names)
            top.describe_sites(self._sites.describe(self.rank))
        news = self._below.news
        if repr(news) != self._news:
            self._news = repr(news)
            top.describe_ranks(news)
        for parcel in parcels:
            top.add_parcel(parcel)
        self._is_unflushed |= bool(parcels)

    def _send(self, link: RankLink, parcels: Iterable[Parcel], *, through: int, is_last: bool) -> None:
        news = self._below.news
        head: dict[str, Any] = {
            "demanded": self._demanded,
            "through": through,
            "joined": sorted(news.joined),
            "done": sorted(self._below.done | ({self.rank} if is_last else set())),
            "gone": {str(rank): step for rank, step in news.gone.items()},
            "late": {str(rank): rows for rank, rows in news.late.items()},
            "differing": list(news.differing.values()),
            "is_last": is_last,
            "is_urgent": self._below.is_waiting,
        }
        try:
            if self._told != self._sites.version:
                link.send(pack("sites", sites=self._sites.tell(), how=self._holdings.merger.how))
                self._told = self._sites.version
            for frame in pack_parcels(parcels, **head):
                link.send(frame)
        except OSError:
            self._above.lose()

    # ---- the end ----

    @property
    def _is_last(self) -> bool:
        """Tell whether nothing more is to come, from here or from below."""
        if self._closing is None:
            return False
        return self._is_tired or not (self._below.sending or self._below.find_missing(self._closing))

    @property
    def _is_tired(self) -> bool:
        return self._closing is not None and time.monotonic() > self._closing + self._patience

    @property
    def _is_over(self) -> bool:
        """Tell whether what is our own is written, and all that is below has ended."""
        return self._has_ended and (self._is_tired or not (self._own.units.kept or self._below.connected))
