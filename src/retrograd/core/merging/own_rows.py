"""What this process records, on its way from the training thread into units."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from retrograd.core.history.sink import Moment
from retrograd.core.merging.holdings import OwnUnits
from retrograd.core.merging.rows import RowMerger, rank_rows
from retrograd.core.merging.sites import SharedSites, read_groups
from retrograd.core.runs.placements import Placements
from retrograd.core.runs.queue import WriteQueue


@dataclass
class OwnRows:
    """What this process has recorded and the thread has not taken yet.

    Attributes:
        queue: rows.
        names: of its sites, in the order of its numbers.
        losses: since they were last taken.
        updates: when they were made, since they were last taken.
        placements: what it holds at its sites.
        how: how users' statistics merge, by name.
        through: all rows of earlier steps have been added.
    """

    queue: WriteQueue
    names: list[str] = field(default_factory=list)
    losses: deque[tuple[Moment, float]] = field(default_factory=deque)
    updates: deque[Moment] = field(default_factory=deque)
    placements: Placements = field(default_factory=Placements)
    how: Mapping[str, str] = field(default_factory=dict)
    through: int = 0


class OwnRecord:
    """Takes what this process has recorded, by the numbers of sites that ranks share.

    Args:
        rank: this one.
        own: where the training thread leaves it.

    Attributes:
        units: what has been taken.
        through: all rows of earlier steps have been taken.
    """

    def __init__(self, rank: int, own: OwnRows) -> None:
        self._rank = rank
        self._own = own
        self._codes = np.zeros(0, np.int64)
        self._stages: dict[str, int] | None = None
        self._placed: object = None
        self.units = OwnUnits(rank)
        self.through = 0

    def take(self, sites: SharedSites, merger: RowMerger) -> None:
        """Take what is there; name its sites, and tell how users' statistics merge."""
        own = self._own
        through = own.through  # first: all before has been added by now
        load = own.queue.take()
        self._place(own.placements, sites)
        merger.how = {**merger.how, **own.how}
        if len(self._codes) < len(own.names):
            names = own.names[len(self._codes) :]
            codes = [sites.number(own.placements.rename(name)) for name in names]
            self._codes = np.concatenate([self._codes, np.array(codes, np.int64)])
        for batch in load.batches:
            self.units.add_rows(rank_rows(batch, self._codes, sites, self._rank))
        for _ in range(len(own.losses)):
            self.units.add_loss(*own.losses.popleft())
        for _ in range(len(own.updates)):
            update = own.updates.popleft()
            self.units.add_update(update.step, update.micro)
        self.through = through

    def _place(self, placements: Placements, sites: SharedSites) -> None:
        if placements is self._placed:
            return
        self._placed = placements
        if self._stages != placements.stages:
            self._stages = dict(placements.stages)
            self._codes = self._codes[:0]
        for name, fact in placements.sites.items():
            spec = str(fact.get("placements", ""))
            sites.place(placements.rename(name), fact["holds"], spec, read_groups(fact))
