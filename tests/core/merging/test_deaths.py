"""Ranks that die in any order cost what they alone knew: all else is in the folder, once.

The tree without processes: who is above whom, what is in flight, and what is on disk are plain values here.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.core.history.sink import Unit
from retrograd.core.merging import tree
from retrograd.core.merging.holdings import Holdings, OwnUnits, Parcel
from retrograd.core.merging.messages import Frames, pack_parcels, unpack_parcels
from retrograd.core.merging.rows import RankedRows, rank_rows
from retrograd.core.merging.sites import SharedSites
from retrograd.core.merging.tree import find_ancestors, find_span
from retrograd.core.runs.ledger import Ledger
from tests.core.merging.test_rows import add_up, make_batch, values_of

RANKS = 8
GROUPS = {
    "own:output": [[rank] for rank in range(RANKS)],
    "copy:weight": [list(range(RANKS))],
    "halves:weight": [list(range(0, RANKS, 2)), list(range(1, RANKS, 2))],
    "near:output": [[first, first + 1] for first in range(0, RANKS, 2)],
}


class Rank:
    def __init__(self, rank: int, world: World) -> None:
        self.rank, self.world = rank, world
        self.sites = SharedSites(RANKS)
        for name, groups in GROUPS.items():
            self.sites.place(name, "copy", "", [group for group in groups if len(group) > 1])
        self.holdings = Holdings(self.sites, find_span(rank, RANKS))
        self.own = OwnUnits(rank)
        self.above: Rank | None = None
        self.demanded = 0
        self.sent: deque[tuple[int, bytes]] = deque()
        self.step = 0
        if rank == 0:
            self.rise()
        else:
            self.connect()

    def rise(self) -> None:
        """Write from here on."""
        self.holdings.merger.is_top = True
        self.world.top = self
        self.reset(self.world.ledger)

    def connect(self) -> None:
        """Go to the nearest one above that lives, or to the one that writes, or be it; what was in flight is lost."""
        self.sent.clear()
        living = [self.world.ranks[rank] for rank in find_ancestors(self.rank) if rank in self.world.ranks]
        heir = self.world.ranks[min(self.world.ranks, default=self.rank)] if self.world.ranks else self
        self.above = next(iter(living), heir)
        if self.above is self:
            self.above = None
            self.rise()
            return
        if self.above.above is None and self.above is not self.world.top:
            self.above.rise()
        self.obey(self.above.holdings.taken)

    def obey(self, taken: Ledger) -> None:
        """Send again what is not in; what is in flight is no longer taken."""
        self.demanded += 1
        self.reset(taken)

    def reset(self, taken: Ledger) -> None:
        self.holdings.reset(Ledger.read(taken.tell()))
        for unit in self.own.kept:
            self.holdings.accept(unit, range(self.rank, self.rank + 1))
        for each in self.below:
            each.obey(self.holdings.taken)

    @property
    def below(self) -> list[Rank]:
        return [each for each in self.world.ranks.values() if each.above is self]

    def record(self) -> None:
        batch = make_batch(self.step, values_of(self.rank, self.step))
        codes = np.array([self.sites.number(name) for name in GROUPS])
        self.own.add_rows(rank_rows(batch, codes, self.sites, self.rank))
        self.step += 1
        for unit in self.own.close():
            self.holdings.accept(unit, range(self.rank, self.rank + 1))

    def hand_on(self) -> None:
        """Send, or write, what is held."""
        parcels = list(self.holdings.take())
        if self.above is None:
            self.world.write(parcels)
        else:
            self.sent.extend((self.demanded, frame) for frame in pack_parcels(parcels))

    def arrive(self) -> None:
        """The next of what is in flight comes."""
        if not self.sent or self.above is None:
            return
        demanded, frame = self.sent.popleft()
        if demanded != self.demanded:
            return
        for head, body in Frames().add(frame):
            for parcel in unpack_parcels(head, body, np.arange(len(GROUPS)), RANKS):
                if not self.above.holdings.accept(parcel, find_span(self.rank, RANKS)):
                    self.obey(self.above.holdings.taken)
                    return

    def hear(self) -> None:
        """Learn what is on disk."""
        self.own.forget(self.world.ledger)


class World:
    def __init__(self) -> None:
        self.ledger = Ledger()
        self.disk: list[RankedRows] = []
        self.units: list[Unit] = []
        self.ranks: dict[int, Rank] = {}
        self.top: Rank | None = None
        for rank in range(RANKS):
            self.ranks[rank] = Rank(rank, self)

    def write(self, parcels: list[Parcel]) -> None:
        for parcel in parcels:
            self.disk += parcel.rows
            self.units += parcel.units
            self.ledger.add(parcel.units)

    def kill(self, rank: int) -> None:
        if len(self.ranks) > 1:
            dead = self.ranks.pop(rank)
            for each in sorted(
                (each for each in self.ranks.values() if each.above is dead), key=lambda each: each.rank
            ):
                each.connect()

    def end(self) -> None:
        """All that live hand on, from the lowest branches up, until nothing is in flight."""
        for _ in range(4):
            for rank in sorted(self.ranks, reverse=True):
                self.ranks[rank].hand_on()
                while self.ranks[rank].sent:
                    self.ranks[rank].arrive()


ACTS = ("record", "hand_on", "arrive", "hear", "connect", "kill")
ODDS = (0.35, 0.25, 0.3, 0.06, 0.02, 0.02)


@pytest.fixture(autouse=True)
def _deep_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "FAN_IN", 2)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(0, 200))
def test_deaths_cost_what_the_dead_alone_knew(seed: int, length: int) -> None:
    world, draw = World(), np.random.default_rng(seed)
    steps = dict.fromkeys(range(RANKS), 0)
    for act, rank in zip(draw.choice(ACTS, length, p=ODDS), draw.integers(RANKS, size=length).tolist(), strict=True):
        if rank not in world.ranks:
            continue
        if act == "kill":
            world.kill(rank)
        else:
            if act != "connect" or world.ranks[rank].above is not None:
                getattr(world.ranks[rank], act)()
            steps[rank] += act == "record"
    world.end()
    assert len(set(world.units)) == len(world.units)
    for rank in world.ranks:
        assert {unit.step for unit in world.units if unit.rank == rank} == set(range(steps[rank]))
    assert_counts(world)


def assert_counts(world: World) -> None:
    """Of each group that holds the same, the elements are there once if a unit of one of them is."""
    expected: dict[tuple[int, str], list[np.ndarray]] = {}
    for name, groups in GROUPS.items():
        for group in groups:
            for step in {unit.step for unit in world.units if unit.rank in group}:
                expected.setdefault((step, name), []).append(values_of(group[0], step)[name])
    found = add_up(world.disk, SharedSitesOf())
    assert sorted(found) == sorted(expected)
    for key, parts in expected.items():
        values = np.concatenate(parts)
        assert found[key]["count"] == len(values), key
        assert found[key]["sum"] == pytest.approx(values[np.isfinite(values)].sum()), key


class SharedSitesOf(SharedSites):
    """The names of all, in the order in which they were placed."""

    def __init__(self) -> None:
        super().__init__(RANKS)
        for name in GROUPS:
            self.number(name)


@pytest.mark.parametrize("length", [10, 150])
def test_one_that_is_far_behind_when_the_writer_dies_has_no_copy_counted_twice(length: int) -> None:
    """What the others held of its copies was written long ago; so long that nobody knows of it any more."""
    world = World()
    behind = world.ranks[RANKS - 1]
    for _ in range(length):
        for rank in world.ranks.values():
            rank.record()
        for rank in sorted(world.ranks, reverse=True)[1:]:
            world.ranks[rank].hand_on()
            while world.ranks[rank].sent:
                world.ranks[rank].arrive()
    assert len(world.units) == (RANKS - 1) * length
    world.kill(0)
    behind.hand_on()
    world.end()
    assert len(world.units) == RANKS * length
    assert_counts(world)
