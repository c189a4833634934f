"""Simulated passes against a count and a clock written out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.memory.budget.measuring import PassNotes
from retrograd.memory.budget.plan import make_plan
from retrograd.memory.budget.planner import evaluate, keep_all, window_of
from retrograd.memory.budget.simulation import (
    Choice,
    Decisions,
    Event,
    EventKind,
    Link,
    MeasuredPass,
    SavedRange,
    count_residency,
    find_departures,
    predict_seconds,
)
from retrograd.memory.policies.policy import Saved

LINK = Link(100.0, 50.0)


def chain(sizes: list[int], seconds: float = 1.0) -> MeasuredPass:
    """A forward that packs these, one after the other, and a backward in reverse order."""
    count = len(sizes)
    events: list[Event] = [("pack", number) for number in range(count)]
    for number in reversed(range(count)):
        events += [("ask", number), ("free", number)]
    ranges = []
    for number, size in enumerate(sizes):
        asked = count + 2 * (count - 1 - number)
        ranges.append(SavedRange(size, f"layer{number}", "float32", number, number + 1, asked, asked + 1))
    return MeasuredPass(tuple(ranges), tuple(events), (seconds,) * len(events))


def test_what_is_kept_adds_up() -> None:
    recording = chain([3, 5, 7])
    held = count_residency(recording, Decisions(("keep",) * 3, 0), {})
    assert held.tolist() == [3, 8, 15, 15, 8, 8, 3, 3, 0]


def test_what_leaves_is_there_until_the_next_one_is_packed_and_from_when_it_is_asked_for() -> None:
    recording = chain([3, 5, 7])
    decisions = Decisions(("offload",) * 3, 0)
    gone = find_departures(recording, decisions)
    assert gone == {0: 2, 1: 3}  # the last one turns round
    assert count_residency(recording, decisions, gone).tolist() == [3, 8, 12, 7, 0, 5, 0, 3, 0]


def test_a_window_holds_the_last_ones() -> None:
    recording = chain([3, 5, 7])
    assert find_departures(recording, Decisions(("offload",) * 3, 12)) == {0: 3}
    assert find_departures(recording, Decisions(("offload",) * 3, 15)) == {}


def test_a_fetch_holds_from_its_position() -> None:
    recording = chain([3, 5, 7])
    decisions = Decisions(("offload",) * 3, 0, {0: 5, 1: 3})
    gone = find_departures(recording, decisions)
    assert count_residency(recording, decisions, gone).tolist() == [3, 8, 12, 12, 5, 8, 3, 3, 0]


def test_what_the_program_holds_does_not_leave() -> None:
    saved_range = SavedRange(4, "", "", 0, 3, 3, 4)
    other = SavedRange(4, "", "", 1, 2, 2, 5)
    events: tuple[Event, ...] = (("pack", 0), ("pack", 1), ("ask", 1), ("ask", 0), ("free", 0), ("free", 1))
    recording = MeasuredPass((saved_range, other), events, (1.0,) * 6)
    assert find_departures(recording, Decisions(("offload",) * 2, 0)) == {}


def test_time_by_hand() -> None:
    """Two ranges of 100 bytes: 1 s to write, 2 s to read, 1 s between events."""
    recording = chain([100, 100])
    decisions = Decisions(("offload",) * 2, 0)
    gone = find_departures(recording, decisions)
    # packed at 1 (written at 2) and at 2 (the first has been written); asked at 3, freed at 4; asked at 5, read until 7
    assert predict_seconds(recording, decisions, gone, LINK) == pytest.approx(8.0)
    # read from 3 to 5, beside what is computed
    fetched = Decisions(decisions.choices, 0, {0: 2})
    assert predict_seconds(recording, fetched, gone, LINK) == pytest.approx(6.0)


def test_what_is_asked_for_now_comes_before_what_was_fetched_ahead() -> None:
    """Three ranges of 100 bytes, 2 s each to read: the second is not fetched ahead, and the first is, from 4 on."""
    recording = chain([100, 100, 100])
    decisions = Decisions(("offload",) * 3, 0, {0: 3})
    gone = find_departures(recording, decisions)
    assert gone == {0: 2, 1: 3}
    # packed at 1, 2, 3 and written at 2, 3, 4; the third is asked for at 4, freed at 5; the second is asked for at 6,
    # when the first has come; it is there at 8 and freed at 9; the first is asked for at 10, freed at 11
    assert predict_seconds(recording, decisions, gone, LINK) == pytest.approx(11.0)
    slow = Link(100.0, 20.0)  # 5 s each: the second is there at 11; the first is asked for at 13, and comes at 14
    assert predict_seconds(recording, decisions, gone, slow) == pytest.approx(15.0)


def test_the_program_waits_for_what_is_beyond_the_window() -> None:
    """Nothing is computed: all that takes time is writing and reading."""
    recording = chain([100, 100, 100], seconds=0.0)
    decisions = Decisions(("offload",) * 3, 0)
    gone = find_departures(recording, decisions)
    assert predict_seconds(recording, decisions, gone, LINK) == pytest.approx(2.0 + 4.0)


sizes = st.lists(st.integers(1, 50), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(sizes, st.data())
def test_residency_is_the_sum_of_what_is_there(given_sizes: list[int], data: st.DataObject) -> None:
    """By asking of each range at each position whether it is there."""
    options: list[Choice] = ["keep", "offload"]
    choices = data.draw(st.lists(st.sampled_from(options), min_size=len(given_sizes), max_size=len(given_sizes)))
    recording = chain(given_sizes)
    decisions = Decisions(tuple(choices), data.draw(st.integers(0, 60)))
    gone = find_departures(recording, decisions)
    expected = []
    for position in range(len(recording.events)):
        total = 0
        for number, (saved_range, choice) in enumerate(zip(recording.ranges, choices, strict=True)):
            assert saved_range.asked is not None
            if not saved_range.packed <= position < saved_range.freed:
                continue
            is_away = (
                position < saved_range.asked and choice == "offload" and position >= gone.get(number, position + 1)
            )
            total += 0 if is_away else saved_range.nbytes
        expected.append(total)
    assert count_residency(recording, decisions, gone).tolist() == expected


@settings(max_examples=100, deadline=None)
@given(sizes, st.integers(1, 200), st.floats(0, 3))
def test_fetching_ahead_never_exceeds_the_budget_nor_costs_time(
    given_sizes: list[int], budget: int, seconds: float
) -> None:
    recording = chain(given_sizes, seconds)
    choices: list[Choice] = ["offload"] * len(given_sizes)
    found = evaluate(recording, choices, LINK, budget)
    bare = Decisions(tuple(choices), window_of(budget))
    gone = find_departures(recording, bare)
    if found is None:
        assert count_residency(recording, bare, gone).max() > budget
        return
    assert found.peak <= budget
    assert found.peak == count_residency(recording, found.decisions, gone).max()
    assert found.seconds <= predict_seconds(recording, bare, gone, LINK) + 1e-9


def test_background_counts() -> None:
    recording = chain([3, 5])
    later = MeasuredPass(recording.ranges, recording.events, recording.seconds, background=100)
    assert keep_all(later).peak == keep_all(recording).peak + 100
    assert np.all(count_residency(later, Decisions(("keep",) * 2, 0), {}) >= 100)


# ---- what was measured ------------------------------------------------------------------------------------------


def log_of(*happened: tuple[EventKind, int, float, float]) -> PassNotes:
    """A pass with two ranges, and what happened in it, from when until when."""
    log = PassNotes()
    for number in range(2):
        values = torch.zeros(10 * (number + 1))
        log.add(Saved(values, values.shape, "layer", number))
    for kind, number, began, ended in happened:
        log.note(kind, number, began, ended)
        if kind == "ask":
            log.asked.add(number)
        if kind == "free":
            log.freed.append(number)
    return log


def test_our_own_part_in_a_pass_is_no_computing() -> None:
    log = log_of(
        ("pack", 0, 1.0, 2.0), ("pack", 1, 5.0, 9.0), ("ask", 1, 10.0, 30.0), ("free", 1, 32.0, 32.0),
        ("ask", 0, 37.0, 38.0), ("free", 0, 40.0, 40.0),
    )  # fmt: skip
    recording = log.make_recording()
    assert recording.seconds == (0.0, 3.0, 1.0, 0.0, 7.0, 2.0)
    assert [saved_range.freed for saved_range in recording.ranges] == [5, 3]


def test_what_is_freed_while_we_are_at_work_is_no_end_of_computing() -> None:
    log = log_of(
        ("pack", 0, 0.0, 0.0), ("pack", 1, 1.0, 1.0), ("free", 1, 50.0, 50.0), ("ask", 0, 4.0, 60.0),
        ("free", 0, 61.0, 61.0),
    )  # fmt: skip
    assert log.make_recording().seconds == (0.0, 1.0, 0.0, 3.0, 1.0)


def test_times_are_those_of_a_later_pass_in_which_the_same_happened() -> None:
    first = log_of(
        ("pack", 0, 0.0, 0.0), ("pack", 1, 10.0, 10.0), ("ask", 1, 20.0, 20.0), ("free", 1, 30.0, 30.0),
        ("ask", 0, 40.0, 40.0), ("free", 0, 50.0, 50.0),
    ).make_recording()  # fmt: skip
    later = log_of(  # under a plan that fetches, things may be freed later
        ("pack", 0, 0.0, 0.5), ("pack", 1, 1.5, 2.0), ("ask", 1, 4.0, 7.0), ("ask", 0, 10.0, 11.0),
        ("free", 0, 15.0, 15.0), ("free", 1, 15.0, 15.0),
    )  # fmt: skip
    again = later.time_again(first)
    assert again == replace(first, seconds=(0.0, 1.0, 2.0, 0.0, 3.0, 4.0))
    assert log_of(("pack", 0, 0.0, 0.0), ("pack", 1, 1.0, 1.0), ("ask", 1, 2.0, 2.0)).time_again(first) is None


def test_better_times_may_change_a_plan_and_never_exceed_its_budget() -> None:
    """At first all looks slow, so that everything leaves beside it; then the link is what is slow."""
    slow = chain([100, 50] * 4, seconds=10.0)
    plan = make_plan(slow, LINK, 400, "host")
    assert plan.choices[0] == "offload"
    fast = replace(slow, seconds=tuple(seconds / 100 for seconds in slow.seconds))
    better = plan.with_times(fast)
    assert better.recording is fast
    as_it_was = evaluate(fast, plan.choices, LINK, 400)
    assert as_it_was is not None
    assert better.predicted_seconds < as_it_was.seconds
    assert better.predicted_peak <= 400
    assert better.smallest == plan.smallest
