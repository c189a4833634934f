"""Which optimizer makes the steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrograd.progress.steps import Leader


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
    [("aaa", "111"), ("abab", "1010"), ("aabaab", "110110"), ("abb", "101"), ("abcabc", "100100"), ("abbbb", "10111")],
)
def test_who_leads(updates: str, ends: str) -> None:
    leader = Leader()
    assert "".join(str(int(leader.ends_step(ord(update)))) for update in updates) == ends
