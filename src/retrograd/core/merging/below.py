"""What a rank knows of those below it: who is there, who has ended, who is gone, and whose copies differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from retrograd.core.foreign.text import check_kinds
from retrograd.core.history.copies import Disagreement
from retrograd.core.merging.above import JOINING_SECONDS, LOOKING_SECONDS
from retrograd.core.merging.links import Door, Peer
from retrograd.core.merging.tree import find_children, find_span

_HASTE_SECONDS = 3.0
_PATIENT_SECONDS = 1.0
"""So long a rank that ends waits for its rows to be complete with those of others: mostly these end, too."""
_HEAD = {
    "through": int,
    "joined": list[int],
    "done": list[int],
    "gone": dict[str, int],
    "late": dict[str, int],
    "differing": list[list[Any]],
}


class News(NamedTuple):
    """What the run tells of the ranks that are merged.

    Attributes:
        joined: whose rows are in it.
        gone: who fell silent, and behind which step.
        late: rows of copies that came too late to count, by the rank that left them out.
        differing: whose copies differ, by site.
    """

    joined: set[int]
    gone: dict[int, int]
    late: dict[int, int]
    differing: dict[str, Disagreement]


class RanksBelow:
    """The ranks below one.

    Args:
        rank, processes: this one, of how many.
        has_called: tells whether a rank has left its address: only one that records does.

    Attributes:
        door: where they connect, once it is open.
        news: what is told upwards.
        done: ranks of which nothing more is to come.
    """

    def __init__(self, rank: int, processes: int, has_called: Callable[[int], bool]) -> None:
        self._rank = rank
        self._processes = processes
        self._has_called = has_called
        self._began = time.monotonic()
        self.door: Door | None = None
        self.news = News({rank}, {}, {}, {})
        self.done: set[int] = set()

    @property
    def connected(self) -> list[Peer]:
        """Those that are there."""
        return [] if self.door is None else [peer for peer in self.door.peers if peer.rank >= 0]

    @property
    def sending(self) -> list[Peer]:
        """Those of which more is to come."""
        return [peer for peer in self.connected if not peer.is_done]

    @property
    def is_waiting(self) -> bool:
        """Tell whether one that has ended waits for its rows to be written, though those of others are not there."""
        now = time.monotonic()
        return any(peer.is_urgent or now > peer.done_at + _PATIENT_SECONDS for peer in self.connected)

    def hear(self, peer: Peer, head: Mapping[str, Any]) -> None:
        """Take in what a rank tells with its rows.

        Raises:
            ValueError: there are no such ranks.
        """
        check_kinds({**dict.fromkeys(_HEAD), **head}, _HEAD)
        joined = {*head["joined"], peer.rank}
        gone, late = ({int(rank): number for rank, number in head[key].items()} for key in ("gone", "late"))
        if not all(0 <= rank < self._processes for rank in {*joined, *gone, *late, *head["done"]}):
            raise ValueError("there are no such ranks")
        peer.through = head["through"]
        peer.heard_of |= joined
        self.news.joined.update(joined)
        self.news.gone.update(gone)
        self.news.late.update(late)
        self.done.update(head["done"])
        for site, *numbers in head["differing"]:
            check_kinds({"site": site, "numbers": numbers}, {"site": str, "numbers": list[int]})
            self.note_difference(Disagreement(site, *numbers))
        peer.is_urgent = bool(head.get("is_urgent"))
        peer.done_at = min(peer.done_at, time.monotonic()) if head.get("is_last") else float("inf")

    def note_difference(self, found: Disagreement) -> None:
        """Note that copies differ at a site; of each the first step counts."""
        known = self.news.differing.get(found.site)
        if known is None or found.step < known.step:
            self.news.differing[found.site] = found

    def miss(self, peer: Peer) -> None:
        """Note that a rank is gone, unless it has come again."""
        if not peer.is_done and peer.rank >= 0 and all(each.rank != peer.rank for each in self.connected):
            self.news.gone[peer.rank] = peer.through

    def find_missing(self, closing: float | None) -> list[int]:
        """Ranks that have not come yet, and may still.

        Args:
            closing: when this rank began to end; None if it has not.
        """
        now = time.monotonic()
        if closing is not None and now < closing + LOOKING_SECONDS and (orphans := self._find_orphans()):
            return orphans
        if now > self._began + JOINING_SECONDS or self.door is None:
            return []
        missing = [rank for rank in find_children(self._rank, self._processes) if rank not in self.news.joined]
        if closing is not None and now > closing + _HASTE_SECONDS:
            missing = [rank for rank in missing if self._has_called(rank)]
        return missing

    def _find_orphans(self) -> list[int]:
        """Ranks whose rows came through one that is gone, and that have not come themselves."""
        gone, joined = self.news.gone, self.news.joined
        below = {rank for each in gone for rank in find_span(each, self._processes) if rank in joined}
        return sorted(below - gone.keys() - self.done - {peer.rank for peer in self.connected})
