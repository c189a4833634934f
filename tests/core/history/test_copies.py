"""Rows that are copies of others, beside a slow count of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.core.errors import RetrogradWarning
from retrograd.core.history.copies import Copies, join_groups

_MOMENT = ("site", "step", "micro", "backward", "phase")
_NUMBERS = ("calls", "count", "nan", "zeros", "sum", "m2", "min", "max")

small = st.integers(0, 2)
tables = st.lists(st.tuples(small, small, small, small, small, st.integers(0, 3), small), max_size=30)
groups_of = st.dictionaries(small, st.lists(st.sets(st.integers(0, 3), min_size=2), max_size=2), max_size=3)


def make_rows(table: list[tuple[int, ...]]) -> dict[str, Any]:
    columns = np.array(table, np.int64).reshape(-1, 7).T
    rows: dict[str, Any] = dict(zip((*_MOMENT, "rank"), columns, strict=False))
    return {**rows, **dict.fromkeys(_NUMBERS, columns[6])}


@settings(deadline=None)
@given(tables, groups_of)
def test_the_lowest_rank_of_each_moment_counts(table: list[tuple[int, ...]], listed: dict[int, Any]) -> None:
    groups = {site: join_groups(found) for site, found in listed.items()}
    copies = Copies(groups, {site: f"site {site}" for site in groups})
    rows = make_rows(table)
    index = np.arange(len(table))
    expected = []
    for *moment, rank, _ in table:
        same = next((each for each in groups.get(moment[0], ()) if rank in each), (rank,))
        present = {other for *when, other, _ in table if when == moment and other in same}
        expected.append(rank == min(present))
    assert copies.count(rows, index)[0].tolist() == expected
    different = set()
    for *moment, rank, _ in table:
        same = next((each for each in groups.get(moment[0], ()) if rank in each), (rank,))
        by_rank = [[value for *when, other, value in table if when == moment and other == each] for each in same]
        if len({tuple(sorted(values)) for values in by_rank if values}) > 1:
            different.add(f"site {moment[0]}")
    assert {each.site for each in copies.count(rows, index)[1]} == different


def test_groups_that_have_a_rank_in_common() -> None:
    assert sorted(join_groups([[0, 1], [2, 3], [1, 2], [5, 6], [7]])) == [(0, 1, 2, 3), (5, 6)]


def test_each_site_is_told_of_once() -> None:
    copies = Copies({0: [(0, 1)]}, {0: "fc:weight"})
    rows = make_rows([(0, 4, 0, 0, 0, rank, rank) for rank in range(2)])
    with pytest.warns(RetrogradWarning, match="Ranks 0 and 1 hold copies of 'fc:weight' that differ from step 4 on"):
        copies.tell(copies.count(rows, np.arange(2))[1])
    copies.tell(copies.count(rows, np.arange(2))[1])


def test_a_rank_of_any_number_takes_no_room() -> None:
    far = 1 << 40
    copies = Copies({1: [(0, far)]}, {1: "site 1"})
    rows = make_rows([(1, 0, 0, 0, 0, 0, 5), (1, 0, 0, 0, 0, far, 5), (1, 0, 0, 0, 0, 7, 5)])
    assert copies.count(rows, np.arange(3))[0].tolist() == [True, False, True]
