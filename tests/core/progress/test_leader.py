"""Which optimizer makes the steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrograd.core.progress.steps import Leader


@given(st.lists(st.integers(0, 3), max_size=40))
def test_steps_are_those_of_the_most_busy_optimizer_or_a_few_less(updates: list[int]) -> None:
    leader = Leader()
    steps = 0
    for number in updates:
        leader.update_begins(number)
        steps += leader.ends_step(number)
    most = max((updates.count(number) for number in range(4)), default=0)
    assert steps <= len(updates)
    assert steps >= most / 2
    assert leader.is_known == bool(updates)


@pytest.mark.parametrize(
    ("updates", "ends"),
    [
        ("aaa", "111"),
        ("abab", "1010"),
        ("aabaab", "110110"),
        ("abb", "101"),
        ("abcabc", "100100"),
        ("abbbb", "10111"),
        ("ab" * 6, "101001010101"),
        ("abc" * 5, "100100001001001"),
        ("abaaaabaaaabaaaa", "1011110111101111"),
        ("ababaaa", "1010011"),
    ],
)
def test_who_leads(updates: str, ends: str) -> None:
    leader = Leader()
    assert "".join(str(int(leader.ends_step(ord(update)))) for update in updates) == ends


@pytest.mark.parametrize("rounds", [3, 4, 40])
@pytest.mark.parametrize("one_round", ["ab", "abc", "cab"])
def test_of_those_that_update_in_turn_a_round_is_a_step(one_round: str, rounds: int) -> None:
    leader = Leader()
    ends = [leader.ends_step(ord(update)) for update in one_round * rounds]
    assert sum(ends) == rounds
    assert ends[-1]
