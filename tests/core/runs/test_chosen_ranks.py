"""Which ranks record, as a user writes it and as a manifest tells it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from retrograd.core.errors import RecordingError
from retrograd.core.runs.chosen_ranks import find_chosen, read_ranks, tell_chosen


@pytest.mark.parametrize(
    ("given", "ranks", "first", "told"),
    [
        ("all", range(20), 0, ""),
        ("1/1", range(20), 0, ""),
        ("1/8", [0, 8, 16], 0, "only one rank in 8 of 20 recorded"),
        ("0", [0], 0, "only rank 0 of 20 recorded"),
        ("16, 0,8", [0, 8, 16], 0, "only ranks 0, 8 and 16 of 20 recorded"),
        ([9, 3], [3, 9], 3, "only ranks 3 and 9 of 20 recorded"),
        (3, [3], 3, "only rank 3 of 20 recorded"),
    ],
)
def test_ranks_that_record(given: str | int | list[int], ranks: Iterable[int], first: int, told: str) -> None:
    chosen = read_ranks(given)
    assert [rank for rank in range(20) if rank in chosen] == list(ranks)
    assert chosen.first == first
    manifest = {"processes": 20, **chosen.describe()}
    assert find_chosen(manifest) == chosen
    assert tell_chosen(manifest) == told


@pytest.mark.parametrize("given", ["", "none", "1/0", "2/8", "0-8", "0,,8", "1/", "-1", -1, [], "0,1/8"])
def test_what_names_no_rank(given: str | int | list[int]) -> None:
    with pytest.raises(RecordingError, match="names no ranks"):
        read_ranks(given)
