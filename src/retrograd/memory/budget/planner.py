"""Choose where each storage range waits, so that a budget is kept at every position, at the least time.

Every plan that is considered is simulated as a whole. What is returned has been checked at each position, so that a
poor guess costs time and never the budget.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from retrograd.memory.budget.simulation import (
    Choice,
    Decisions,
    Link,
    MeasuredPass,
    SavedRange,
    count_residency,
    find_departures,
    predict_seconds,
)


def list_orders(recording: MeasuredPass, link: Link) -> Iterator[list[int]]:
    """Orders in which to offload ranges, by their numbers."""
    movable = _movable(recording)
    prices = {number: link.price(recording.ranges[number].nbytes) for number in movable}
    yield sorted(movable, key=lambda number: prices[number] / max(1, _freed(recording.ranges[number])))
    hidden = _hidden_offloads(recording, link, movable)
    rest = set(movable) - set(hidden)
    yield hidden + sorted(rest, key=lambda number: prices[number] / max(1, recording.ranges[number].nbytes))
    yield from list_steady_orders(recording)


def _hidden_offloads(recording: MeasuredPass, link: Link, movable: Sequence[int]) -> list[int]:
    """List what can leave at no cost while the forward runs: whatever is packed while the link is free."""
    can_leave = set(movable)
    hidden: list[int] = []
    now = free_at = 0.0
    for (kind, number), seconds in zip(recording.events, recording.seconds, strict=True):
        now += seconds
        if kind == "pack" and number in can_leave and free_at <= now:
            free_at = now + recording.ranges[number].nbytes / link.out
            hidden.append(number)
    return hidden


def list_steady_orders(recording: MeasuredPass) -> Iterator[list[int]]:
    """Orders that depend on no clock, so that the smallest budget of a pass is found again for the next one."""
    movable = _movable(recording)
    yield sorted(movable, key=lambda number: -recording.ranges[number].nbytes)
    yield sorted(movable, key=lambda number: -_freed(recording.ranges[number]))


def _freed(saved_range: SavedRange) -> int:
    """Bytes and positions that can be freed."""
    return saved_range.nbytes * (saved_range.needed - saved_range.can_leave)


def _movable(recording: MeasuredPass) -> list[int]:
    """Numbers of the ranges that free memory where they leave."""
    return [number for number, each in enumerate(recording.ranges) if each.can_leave < each.needed]


_HASTE = 2.0
"""Copies back begin so many times their own duration before they have to, since links and clocks are not steady."""


def schedule_fetches(
    recording: MeasuredPass,
    decisions: Decisions,
    departures: Mapping[int, int],
    held: npt.NDArray[np.int64],
    link: Link,
    budget: int,
) -> dict[int, int]:
    """Find after which request each range is brought back.

    Args:
        recording: the pass.
        decisions: what becomes of its ranges.
        departures: what leaves, and when.
        held: bytes at each position if everything is brought back when it is asked for.
        link: its speed.
        budget: bytes that must not be exceeded at any position.

    Returns:
        Range → position of a first request, as in :attr:`Decisions.fetches`.
    """
    held = held.copy()
    times = np.cumsum(recording.seconds)
    triggers_at = {saved_range.asked for saved_range in recording.ranges if saved_range.asked is not None}
    triggers = sorted(triggers_at)
    asked = [(at, number) for number in departures if (at := recording.ranges[number].needed) in triggers_at]
    fetches: dict[int, int] = {}
    busy_from = float("inf")
    for needed, number in sorted(asked, reverse=True):
        nbytes = recording.ranges[number].nbytes
        busy_from = min(busy_from, float(times[needed])) - _HASTE * nbytes / link.back
        ideal = bisect_right(triggers, int(np.searchsorted(times, busy_from, side="right")) - 1) - 1
        start = max(triggers[max(ideal, 0)], departures[number])
        full = np.flatnonzero(held[start:needed] + nbytes > budget)
        if len(full):
            start += int(full[-1]) + 1
        chosen = triggers[bisect_left(triggers, start)]
        if chosen < needed:
            held[chosen:needed] += nbytes
            fetches[number] = chosen
    return fetches


_TRIALS = 1000
"""Simulations spent on improving a plan: a second or two for a ResNet-152."""
_WINDOW_SHARE = 8
_PRECISION = 256
"""The smallest budget is found up to such a part of what is held if everything is kept."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Decisions with their time and memory.

    Attributes:
        decisions: what becomes of each range.
        peak: bytes held at the worst position.
        seconds: how long the pass takes.
    """

    decisions: Decisions
    peak: int
    seconds: float


def window_of(budget: int) -> int:
    """Bytes that may be in flight under a budget: an eighth of it."""
    return budget // _WINDOW_SHARE


def keep_all(recording: MeasuredPass) -> Solution:
    """Simulate a pass without a plan."""
    keep: Choice = "keep"
    decisions = Decisions((keep,) * len(recording.ranges), 0)
    peak = int(count_residency(recording, decisions, {}).max(initial=recording.background))
    return Solution(decisions, peak, sum(recording.seconds))


def evaluate(recording: MeasuredPass, choices: Sequence[Choice], link: Link, budget: int) -> Solution | None:
    """Find the best that can be made of some choices; None if they exceed the budget."""
    decisions = Decisions(tuple(choices), window_of(budget))
    departures = find_departures(recording, decisions)
    held = count_residency(recording, decisions, departures)
    if held.max(initial=recording.background) > budget:
        return None
    decisions = replace(decisions, fetches=schedule_fetches(recording, decisions, departures, held, link, budget))
    peak = int(count_residency(recording, decisions, departures).max(initial=recording.background))
    return Solution(decisions, peak, predict_seconds(recording, decisions, departures, link))


def find_solution(recording: MeasuredPass, link: Link, budget: int, trials: int = _TRIALS) -> Solution | None:
    """Find a fast way to hold no more than the budget at any position.

    Ranges are offloaded in several orders, in each as few as suffice; then, in the fastest of these, single choices
    are changed as long as that saves time.

    Args:
        recording: the pass.
        link: its speed.
        budget: bytes.
        trials: how many changes to try.

    Returns:
        The fastest that was found; None where no order of moving leads under the budget.
    """
    everything = keep_all(recording)
    if everything.peak <= budget:
        return everything
    starts = [
        found
        for order in list_orders(recording, link)
        if (found := _move_few(recording, order, link, budget)) is not None
    ]
    if not starts:
        return None
    best = min(starts, key=lambda solution: solution.seconds)
    return _improve(recording, best, link, budget, trials)


def find_smallest(recording: MeasuredPass, link: Link) -> int:
    """Find the smallest budget, in bytes, for which :func:`find_solution` finds any."""
    high = keep_all(recording).peak
    low = recording.background
    step = max(1, high // _PRECISION)
    orders = list(list_steady_orders(recording))
    while high - low > step:
        middle = (low + high) // 2
        if any(_move_few(recording, order, link, middle) is not None for order in orders):
            high = middle
        else:
            low = middle
    return high


def _move_few(recording: MeasuredPass, order: list[int], link: Link, budget: int) -> Solution | None:
    """Offload as few as suffice, in this order.

    The last resort is to offload also what is needed too soon to leave: what left before it leaves for good then.
    """
    moved = set(order)
    order = order + [number for number in range(len(recording.ranges)) if number not in moved]

    def solve(count: int) -> Solution | None:
        choices: list[Choice] = ["keep"] * len(recording.ranges)
        for number in order[:count]:
            choices[number] = "offload"
        return evaluate(recording, choices, link, budget)

    found = solve(len(order))
    low, high = 0, len(order)
    while found is not None and high - low > 1:
        middle = (low + high) // 2
        fewer = solve(middle)
        if fewer is None:
            low = middle
        else:
            found, high = fewer, middle
    return found


def _improve(recording: MeasuredPass, best: Solution, link: Link, budget: int, trials: int) -> Solution:
    """Change one choice at a time while that saves time, the largest ranges first."""
    numbers = sorted(range(len(recording.ranges)), key=lambda number: -recording.ranges[number].nbytes)
    movable = set(_movable(recording))
    has_changed = True
    while has_changed and trials > 0:
        has_changed = False
        for number in numbers:
            choices = list(best.decisions.choices)
            if trials <= 0 or (choices[number] == "keep" and number not in movable):
                continue
            trials -= 1
            choices[number] = "keep" if choices[number] == "offload" else "offload"
            changed = evaluate(recording, choices, link, budget)
            if changed is not None and changed.seconds < best.seconds:
                best, has_changed = changed, True
    return best
