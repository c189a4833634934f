"""Rows that ranks hand on, merged in any order and by any tree, are what one reader makes of all of them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.core.history.sink import Moment, RowBatch
from retrograd.core.merging.holdings import Parcel
from retrograd.core.merging.messages import Frames, pack_parcels, unpack_parcels
from retrograd.core.merging.rows import RankedRows, RowMerger, rank_rows, unrank_rows
from retrograd.core.merging.sites import SharedSites
from retrograd.core.merging.tree import FAN_IN, find_ancestors, find_children, find_span
from retrograd.core.statistics.row import BINS, EXPONENT_BIAS, ROW

RANKS = 40
GROUPS = {
    "own:output": [],
    "copy:weight": [list(range(RANKS))],
    "halves:weight": [list(range(0, RANKS, 2)), list(range(1, RANKS, 2))],
    "near:output": [[first, first + 1] for first in range(0, RANKS, 2)],
}


def make_batch(step: int, values: dict[str, np.ndarray], custom: bool = False) -> RowBatch:
    """One row a site, by numpy alone."""
    rows = np.zeros(len(values), ROW)
    stretches = []
    for number, (row, each) in enumerate(zip(rows, values.values(), strict=True)):
        finite = each[np.isfinite(each)]
        row["row"], row["calls"], row["order"] = number, 1, number
        row["count"], row["nan"] = len(each), np.isnan(each).sum()
        row["zeros"], row["sum"], row["abs_sum"] = (each == 0).sum(), finite.sum(), np.abs(finite).sum()
        row["m2"] = ((finite - finite.mean()) ** 2).sum() if len(finite) else 0.0
        row["min"], row["max"] = finite.min(initial=np.inf), finite.max(initial=-np.inf)
        counts = count_exponents(each)
        used = np.flatnonzero(counts)
        if len(used):
            row["first_bin"], row["bins"] = used[0], used[-1] - used[0] + 1
            stretches.append(counts[used[0] : used[-1] + 1])
    bins = np.concatenate([np.zeros(0, np.int64), *stretches]).astype(np.int64)
    extra = {"largest": (list(range(len(values))), [float(np.nanmax(each)) for each in values.values()])}
    return RowBatch(Moment(step), rows.tobytes(), bins.tobytes(), 1.0, extra if custom else {})  # type: ignore[arg-type]


def count_exponents(values: np.ndarray) -> np.ndarray:
    seen = values[np.isfinite(values) & (values != 0)]
    return np.bincount(np.floor(np.log2(np.abs(seen))).astype(int) + EXPONENT_BIAS, minlength=BINS)


def values_of(rank: int, step: int) -> dict[str, np.ndarray]:
    """What a rank holds: the same for all who hold copies, and a number that is none for one of them."""

    def draw(*seed: int) -> np.ndarray:
        return np.random.default_rng(seed).normal(size=5).astype(np.float32).astype(float) * [0, 1, 1, 1, 1]

    own = draw(1, rank, step)
    own[1] = np.nan if rank == 3 else own[1]
    return {
        "own:output": own,
        "copy:weight": draw(2, step),
        "halves:weight": draw(3, rank % 2, step),
        "near:output": draw(4, rank // 2, step),
    }


def union(step: int, ranks: range = range(RANKS)) -> dict[str, np.ndarray]:
    """All elements, copies once."""
    every = {rank: values_of(rank, step) for rank in ranks}
    return {
        "own:output": np.concatenate([each["own:output"] for each in every.values()]),
        "copy:weight": every[0]["copy:weight"],
        "halves:weight": np.concatenate([every[rank]["halves:weight"] for rank in (0, 1)]),
        "near:output": np.concatenate([every[rank]["near:output"] for rank in ranks if rank % 2 == 0]),
    }


class Place:
    """A rank of the tree without its thread."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.sites = SharedSites(RANKS)
        self.merger = RowMerger(self.sites, find_span(rank, RANKS), {"largest": "max"})
        self.merger.is_top = rank == 0

    def record(self, step: int) -> None:
        values = values_of(self.rank, step)
        for name in values:
            mine = [group for group in GROUPS[name] if self.rank in group]
            self.sites.place(name, "copy" if mine else "own", "", mine)
        codes = np.array([self.sites.number(name) for name in values])
        self.merger.add(rank_rows(make_batch(step, values, custom=True), codes, self.sites, self.rank))

    def hear(self, other: Place) -> None:
        codes = self.sites.hear(other.sites.tell())
        parcels = [Parcel((rows.batch.moment.step, 0), (), (rows,)) for rows in other.merger.take()]
        for frame in pack_parcels(parcels):
            for head, body in Frames().add(frame):
                for parcel in unpack_parcels(head, body, codes, RANKS):
                    self.merger.add(*parcel.rows)


def add_up(found: list[RankedRows], sites: SharedSites) -> dict[tuple[int, str], dict[str, float | np.ndarray]]:
    """Further rows of a site and moment added up, as a reader does; the mean and m2 by the union's formula."""
    totals: dict[tuple[int, str], dict[str, float | np.ndarray]] = {}
    for each in found:
        batch = unrank_rows(each)
        bins = np.frombuffer(batch.bins, np.int64)
        at = 0
        for row in np.frombuffer(batch.rows, ROW):
            total = totals.setdefault(
                (batch.moment.step, sites.names[row["row"]]),
                {"count": 0, "nan": 0, "zeros": 0, "sum": 0.0, "squares": 0.0, "max": -np.inf, "bins": np.zeros(BINS)},
            )
            for name in ("count", "nan", "zeros", "sum"):
                total[name] += row[name]
            n = row["count"] - row["nan"]
            total["squares"] += row["m2"] + row["sum"] ** 2 / max(n, 1)
            total["max"] = max(total["max"], row["max"])
            total["bins"][row["first_bin"] : row["first_bin"] + row["bins"]] += bins[at : at + row["bins"]]  # type: ignore[index]
            at += row["bins"]
    return totals


def assert_union(totals: dict[tuple[int, str], dict[str, float | np.ndarray]], steps: range) -> None:
    assert sorted(totals) == sorted((step, name) for step in steps for name in GROUPS)
    for (step, name), total in totals.items():
        values = union(step)[name]
        finite = values[np.isfinite(values)]
        assert total["count"] == len(values), name
        assert (total["nan"], total["zeros"]) == (np.isnan(values).sum(), (values == 0).sum())
        assert total["sum"] == pytest.approx(finite.sum())
        assert total["squares"] == pytest.approx((finite**2).sum())
        assert total["max"] == finite.max()
        np.testing.assert_array_equal(total["bins"], count_exponents(values))


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(1, RANKS)), st.sets(st.integers(0, 3 * RANKS)))
def test_any_order_of_handing_on_gives_the_union(order: list[int], early: set[int]) -> None:
    places = {rank: Place(rank) for rank in range(RANKS)}
    found: list[RankedRows] = []
    for step in range(3):
        for rank in order:
            places[rank].record(step)
            places[find_ancestors(rank)[0]].hear(places[rank])
            if step * RANKS + rank in early:  # the top hands on what is not complete
                found += places[0].merger.take()
        places[0].record(step)
    for rank in sorted(places, reverse=True)[:-1]:
        places[find_ancestors(rank)[0]].hear(places[rank])
    found += places[0].merger.take()
    assert_union(add_up(found, places[0].sites), range(3))
    assert not places[0].merger.differing


def test_a_users_statistic_is_merged_as_it_says() -> None:
    places = [Place(rank) for rank in range(RANKS)]
    for place in places:
        place.record(0)
    for place in reversed(places[1:]):
        places[find_ancestors(place.rank)[0]].hear(place)
    (merged,) = places[0].merger.take()
    batch = unrank_rows(merged)
    codes, values = batch.custom["largest"]
    found = {places[0].sites.names[code]: value for code, value in zip(codes, values, strict=True)}
    assert found == {name: np.nanmax(values) for name, values in union(0).items()}


def test_copies_that_differ_are_told() -> None:
    places = [Place(0), Place(1)]
    for place in places:
        place.record(0)
    other = make_batch(1, {"copy:weight": np.array([1.0, 2.0])})
    mine = make_batch(1, {"copy:weight": np.array([1.0, 3.0])})
    for place, batch in zip(places, (mine, other), strict=True):
        codes = np.array([place.sites.number("copy:weight")])
        place.merger.add(rank_rows(batch, codes, place.sites, place.rank))
    places[0].hear(places[1])
    rows = [np.frombuffer(each.batch.rows, ROW) for each in places[0].merger.take()]
    assert [each["max"].tolist() for each in rows if len(each) == 1] == [[3.0]]
    assert list(places[0].merger.differing.values()) == [("copy:weight", 1, 0, 1)]


@pytest.mark.parametrize("processes", [1, 2, 16, 17, 40, 1000])
def test_the_tree_has_every_rank_once(processes: int) -> None:
    below = {rank: find_children(rank, processes) for rank in range(processes)}
    assert sorted(rank for ranks in below.values() for rank in ranks) == list(range(1, processes))
    for rank, ranks in below.items():
        assert len(ranks) <= 3 * (FAN_IN - 1)
        assert all(find_ancestors(each)[0] == rank for each in ranks)
        assert set(ranks) <= set(find_span(rank, processes))
    for rank in range(1, processes):
        path = [rank, *find_ancestors(rank)]
        assert path[-1] == 0
        assert all(near in find_span(far, processes) for near, far in pairwise(path))
