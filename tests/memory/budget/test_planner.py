"""Plans against all plans there are, on small passes."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.core.amounts import show_bytes
from retrograd.core.errors import BudgetError, SavedPolicyError
from retrograd.memory.budget.plan import make_plan
from retrograd.memory.budget.planned import read_budget
from retrograd.memory.budget.planner import Solution, evaluate, find_smallest, find_solution, keep_all
from retrograd.memory.budget.simulation import Choice, Event, Link, MeasuredPass, SavedRange
from tests.memory.budget.test_simulation import LINK, chain

FACTOR = 1.25
"""How much slower than the fastest of all plans one may be that was found."""
OPTIONS: list[Choice] = ["keep", "offload"]


@st.composite
def recordings(draw: st.DrawFn) -> MeasuredPass:
    """Passes whose backward asks in any order, with ranges that the program holds for a while."""
    count = draw(st.integers(1, 5))
    order = draw(st.permutations(range(count)))
    events: list[Event] = [("pack", number) for number in range(count)]
    for number in order:
        events += [("ask", number), ("free", number)]
    ranges = []
    for number in range(count):
        asked = count + 2 * order.index(number)
        nbytes = draw(st.integers(10, 100))
        left = draw(st.integers(number + 1, asked + 1))
        ranges.append(SavedRange(nbytes, "", "", number, left, asked, asked + 1))
    seconds = draw(st.lists(st.floats(0.1, 3), min_size=len(events), max_size=len(events)))
    return MeasuredPass(tuple(ranges), tuple(events), tuple(seconds))


def search_all(recording: MeasuredPass, link: Link, budget: int) -> Solution | None:
    """The fastest of all plans."""
    found = []
    for choices in product(OPTIONS, repeat=len(recording.ranges)):
        solution = evaluate(recording, choices, link, budget)
        if solution is not None:
            found.append(solution)
    return min(found, key=lambda solution: solution.seconds, default=None)


@settings(max_examples=120, deadline=None)
@given(recordings(), st.floats(0.2, 1.0))
def test_never_over_the_budget_and_nearly_as_fast_as_the_best(recording: MeasuredPass, share: float) -> None:
    budget = max(1, int(share * keep_all(recording).peak))
    found, best = find_solution(recording, LINK, budget), search_all(recording, LINK, budget)
    if best is None:
        assert found is None
        return
    assert found is not None
    assert found.peak <= budget
    assert found.seconds <= FACTOR * best.seconds


@settings(max_examples=60, deadline=None)
@given(recordings())
def test_the_smallest_budget_can_be_met(recording: MeasuredPass) -> None:
    smallest = find_smallest(recording, LINK)
    found = find_solution(recording, LINK, smallest)
    assert found is not None
    assert found.peak <= smallest
    assert smallest >= max(saved_range.nbytes for saved_range in recording.ranges)


def test_a_transfer_that_is_hidden_is_free() -> None:
    """Of eight equal ranges the first ones have all the time of the pass to leave and to come back."""
    recording = chain([100] * 8, seconds=10.0)
    found = find_solution(recording, LINK, 600)
    assert found is not None
    assert found.seconds == pytest.approx(sum(recording.seconds))
    assert found.decisions.choices[0] == "offload"
    assert found.decisions.choices[-1] == "keep"


def test_nothing_is_moved_where_all_finds_room() -> None:
    found = find_solution(chain([5, 6]), LINK, 11)
    assert found is not None
    assert set(found.decisions.choices) == {"keep"}


def test_a_budget_that_is_too_small_names_the_smallest() -> None:
    recording = chain([1000] * 4)
    with pytest.raises(BudgetError, match=f"{find_smallest(recording, LINK)} bytes"):
        make_plan(recording, LINK, 100, "disk")


def test_a_plan_explains_itself() -> None:
    recording = chain([1_000_000] * 8)
    plan = make_plan(recording, Link(1e6, 1e6), 4_000_000, "disk")
    text = plan.explain()
    assert text == str(plan)
    for part in ("4 MB", "8 MB", "layer0", "disk", "keep", show_bytes(plan.smallest), "this one"):
        assert part in text
    curve = plan.curve()
    assert curve[0][0] == plan.smallest
    assert curve[-1] == (plan.kept_peak, pytest.approx(plan.kept_seconds))
    assert plan.predicted_peak <= plan.budget


@pytest.mark.parametrize(
    ("given_budget", "expected"),
    [
        (8, 8), ("8GB", 8 * 10**9), ("500MB", 500 * 10**6), ("1.5 GiB", 3 << 29), ("4kib", 4096), ("7b", 7),
        (0.5, 0.5), (1.0, 1.0),
    ],
)  # fmt: skip
def test_budgets_are_read(given_budget: float | str, expected: float) -> None:
    found = read_budget(given_budget)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("given_budget", [0, -1, 0.0, 1.5, "8", "GB", "8 XB", "0MB", True, float("nan"), None, "-3GB"])
def test_other_things_are_no_budgets(given_budget: object) -> None:
    with pytest.raises(SavedPolicyError):
        read_budget(given_budget)  # type: ignore[arg-type]
