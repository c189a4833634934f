"""Simulated passes against a count and a clock written out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.saved.planner import evaluate, keep_all, window_of
from retrograd.saved.prediction import predict_seconds
from retrograd.saved.simulation import (
    Choice,
    Decisions,
    Event,
    Link,
    Recording,
    Stretch,
    count_residency,
    find_departures,
)

LINK = Link(100.0, 50.0)


def chain(sizes: list[int], seconds: float = 1.0, **more: int) -> Recording:
    """A forward that packs these, one after the other, and a backward in reverse order."""
    count = len(sizes)
    events: list[Event] = [("pack", number) for number in range(count)]
    for number in reversed(range(count)):
        events += [("ask", number), ("free", number)]
    stretches = []
    for number, size in enumerate(sizes):
        asked = count + 2 * (count - 1 - number)
        stretches.append(Stretch(size, f"layer{number}", "float32", number, number + 1, asked, asked + 1, **more))
    return Recording(tuple(stretches), tuple(events), (seconds,) * len(events))


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


def test_a_lossless_copy_is_there_all_the_time() -> None:
    recording = chain([4, 8], small_bytes=1)
    held = count_residency(recording, Decisions(("lossless", "keep"), 0), {})
    assert held.tolist() == [5, 9, 9, 1, 5, 0]


def again(recording: Recording, *sources: tuple[int, ...], seconds: float = 0.25, beside: int = 0) -> Recording:
    """The same pass, where each stretch with sources can be made of these."""
    stretches = (
        replace(stretch, rerun="relu", sources=given, rerun_seconds=seconds, rerun_bytes=beside) if given else stretch
        for stretch, given in zip(recording.stretches, sources, strict=True)
    )
    return replace(recording, stretches=tuple(stretches))


def test_what_is_made_again_is_away_in_between_and_takes_what_it_needs_beside() -> None:
    recording = again(chain([3, 5, 7]), (), (0,), (), beside=2)
    decisions = Decisions(("keep", "rerun", "keep"), 0)
    assert count_residency(recording, decisions, {}).tolist() == [3, 8, 10, 10, 3, 10, 3, 3, 0]
    assert predict_seconds(recording, decisions, {}, LINK) == pytest.approx(9.25)


def test_what_others_are_made_of_is_made_before_them_and_stays() -> None:
    """The third is asked for before the second, of which it is made, and that of the first."""
    events: tuple[Event, ...] = (
        ("pack", 0), ("pack", 1), ("pack", 2), ("ask", 0),
        ("ask", 2), ("free", 2), ("ask", 1), ("free", 1), ("free", 0),
    )  # fmt: skip
    stretches = (
        Stretch(3, "", "", 0, 1, 3, 8), Stretch(5, "", "", 1, 2, 6, 7), Stretch(7, "", "", 2, 3, 4, 5),
    )  # fmt: skip
    recording = again(Recording(stretches, events, (1.0,) * 9), (), (0,), (1,))
    decisions = Decisions(("keep", "rerun", "rerun"), 0)
    assert count_residency(recording, decisions, {}).tolist() == [3, 8, 10, 3, 15, 8, 8, 3, 0]
    assert predict_seconds(recording, decisions, {}, LINK) == pytest.approx(9.5)


def test_what_others_are_made_of_comes_back_from_elsewhere_before_them() -> None:
    recording = again(chain([3, 5, 7, 1]), (), (0,), (), ())
    decisions = Decisions(("offload", "rerun", "offload", "keep"), 0)
    gone = find_departures(recording, decisions)
    assert gone == {0: 3}
    # at 8 the second is made of the first, which would be asked for at 10 only
    assert count_residency(recording, decisions, gone).tolist() == [3, 8, 10, 8, 8, 7, 7, 0, 8, 3, 3, 0]


def test_what_others_are_made_of_goes_after_them() -> None:
    """The first is freed before the second, which may be asked for once more."""
    events: tuple[Event, ...] = (("pack", 0), ("pack", 1), ("ask", 1), ("ask", 0), ("free", 0), ("free", 1))
    stretches = Stretch(4, "", "", 0, 1, 3, 4), Stretch(6, "", "", 1, 2, 2, 5)
    recording = again(Recording(stretches, events, (1.0,) * 6), (), (0,))
    assert count_residency(recording, Decisions(("keep",) * 2, 0), {}).tolist() == [4, 10, 10, 10, 6, 0]
    assert count_residency(recording, Decisions(("keep", "rerun"), 0), {}).tolist() == [4, 10, 10, 10, 10, 0]


def test_what_the_program_holds_does_not_leave() -> None:
    stretch = Stretch(4, "", "", 0, 3, 3, 4)
    other = Stretch(4, "", "", 1, 2, 2, 5)
    events: tuple[Event, ...] = (("pack", 0), ("pack", 1), ("ask", 1), ("ask", 0), ("free", 0), ("free", 1))
    recording = Recording((stretch, other), events, (1.0,) * 6)
    assert find_departures(recording, Decisions(("offload",) * 2, 0)) == {}


def test_time_by_hand() -> None:
    """Two stretches of 100 bytes: 1 s to write, 2 s to read, 1 s between events."""
    recording = chain([100, 100])
    decisions = Decisions(("offload",) * 2, 0)
    gone = find_departures(recording, decisions)
    # packed at 1 (written at 2) and at 2 (the first has been written); asked at 3, freed at 4; asked at 5, read until 7
    assert predict_seconds(recording, decisions, gone, LINK) == pytest.approx(8.0)
    # read from 3 to 5, beside what is computed
    fetched = Decisions(decisions.choices, 0, {0: 2})
    assert predict_seconds(recording, fetched, gone, LINK) == pytest.approx(6.0)


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
    """By asking of each stretch at each position whether it is there."""
    options: list[Choice] = ["keep", "offload", "lossless"]
    choices = data.draw(st.lists(st.sampled_from(options), min_size=len(given_sizes), max_size=len(given_sizes)))
    recording = chain(given_sizes, small_bytes=1)
    decisions = Decisions(tuple(choices), data.draw(st.integers(0, 60)))
    gone = find_departures(recording, decisions)
    expected = []
    for position in range(len(recording.events)):
        total = 0
        for number, (stretch, choice) in enumerate(zip(recording.stretches, choices, strict=True)):
            assert stretch.asked is not None
            if not stretch.packed <= position < stretch.freed:
                continue
            is_away = position < stretch.asked and (
                (choice == "offload" and number in gone and position >= gone[number])
                or (choice == "lossless" and position > stretch.packed)
            )
            total += (0 if is_away else stretch.nbytes) + (choice == "lossless")
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
    later = Recording(recording.stretches, recording.events, recording.seconds, background=100)
    assert keep_all(later).peak == keep_all(recording).peak + 100
    assert np.all(count_residency(later, Decisions(("keep",) * 2, 0), {}) >= 100)
