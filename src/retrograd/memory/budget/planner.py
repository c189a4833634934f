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
    find_spans,
    predict_seconds,
)

Move = tuple[int, Choice]


def list_orders(recording: MeasuredPass, link: Link) -> Iterator[list[Move]]:
    """Orders in which to move ranges, each with where it goes."""
    moves = _all_moves(recording)
    prices = {move: _price(recording.ranges[move[0]], move[1], link) for move in moves}
    yield _first_of_each(sorted(moves, key=lambda move: prices[move] / max(1, _freed(recording.ranges[move[0]]))))
    by_price = sorted(moves, key=lambda move: prices[move])
    recomputed_first = sorted(by_price, key=lambda move: move[1] == "offload")
    costs = sorted(_cost_per_byte(saved_range) for saved_range in recording.ranges)
    for least in (0.0, costs[len(costs) // 2]):
        yield _first_of_each([*_hidden_offloads(recording, link, least), *recomputed_first])
    yield from list_steady_orders(recording)


def _hidden_offloads(recording: MeasuredPass, link: Link, least: float) -> list[Move]:
    """List what can leave at no cost while the forward runs: whatever is packed while the link is free.

    Args:
        recording: the pass.
        link: its speed.
        least: seconds a byte below which a range is recomputed instead.
    """
    can_leave = {move[0] for move in _all_moves(recording) if move[1] == "offload"}
    hidden: list[Move] = []
    now = free_at = 0.0
    for (kind, number), seconds in zip(recording.events, recording.seconds, strict=True):
        now += seconds
        saved_range = recording.ranges[number]
        if kind == "pack" and number in can_leave and free_at <= now and _cost_per_byte(saved_range) >= least:
            free_at = now + saved_range.nbytes / link.out
            hidden.append((number, "offload"))
    return hidden


def _cost_per_byte(saved_range: SavedRange) -> float:
    """Seconds a byte that recomputing it takes."""
    return saved_range.recompute_seconds / saved_range.nbytes if saved_range.recompute else float("inf")


def list_steady_orders(recording: MeasuredPass) -> Iterator[list[Move]]:
    """Orders that depend on no clock, so that the smallest budget of a pass is found again for the next one."""
    moves = _all_moves(recording)
    by_size = sorted(moves, key=lambda move: -recording.ranges[move[0]].nbytes)
    for first in ("offload", "recompute"):
        yield _first_of_each(sorted(by_size, key=lambda move: move[1] != first))
    yield _first_of_each(sorted(moves, key=lambda move: -_freed(recording.ranges[move[0]])))


def _freed(saved_range: SavedRange) -> int:
    """Bytes and positions that can be freed."""
    return saved_range.nbytes * (saved_range.needed - saved_range.can_leave)


def _all_moves(recording: MeasuredPass) -> list[Move]:
    return [move for number, saved_range in enumerate(recording.ranges) for move in list_moves(number, saved_range)]


def list_moves(number: int, saved_range: SavedRange) -> Iterator[Move]:
    """List what could be done with a range to free memory."""
    if saved_range.can_leave < saved_range.needed:
        yield number, "offload"
        if saved_range.recompute:
            yield number, "recompute"


def _price(saved_range: SavedRange, choice: Choice, link: Link) -> float:
    """Seconds for each byte that is freed, if nothing ran beside it."""
    seconds = saved_range.recompute_seconds if choice == "recompute" else link.price(saved_range.nbytes)
    return seconds / max(1, saved_range.nbytes)


def _first_of_each(moves: list[Move]) -> list[Move]:
    seen: set[int] = set()
    return [move for move in moves if not (move[0] in seen or seen.add(move[0]))]  # type: ignore[func-returns-value]


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
    spans = find_spans(recording, decisions.choices)
    asked = [(at, number) for number in departures if (at := spans.needed[number]) in triggers_at]
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

    Ranges are moved in several orders, in each as few as suffice; then, in the fastest of these, single
    choices are taken back or changed as long as that saves time. What is recomputed has to be worth what it takes to
    note operations in every pass, however few are recomputed: so it is looked for once more without.

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
    found = _search(recording, link, budget, trials)
    without = recording.without_recomputing()
    if found is None or not recording.noting_seconds or without == recording:
        return found
    unnoted = _search(without, link, budget, trials)
    return unnoted if unnoted is not None and unnoted.seconds < found.seconds else found


def _search(recording: MeasuredPass, link: Link, budget: int, trials: int) -> Solution | None:
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


def _move_few(recording: MeasuredPass, order: list[Move], link: Link, budget: int) -> Solution | None:
    """Move as few as suffice, in this order.

    The last resort is to offload also what is needed too soon to leave: what left before it leaves for good then.
    """
    moved = {number for number, _ in order}
    order = order + [(number, "offload") for number in range(len(recording.ranges)) if number not in moved]

    def solve(count: int) -> Solution | None:
        choices: list[Choice] = ["keep"] * len(recording.ranges)
        for number, choice in order[:count]:
            choices[number] = choice
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
    options: dict[int, list[Choice]] = {
        number: ["keep", *(choice for _, choice in list_moves(number, recording.ranges[number]))] for number in numbers
    }
    has_changed = True
    while has_changed and trials > 0:
        has_changed = False
        for number in numbers:
            for option in options[number]:
                choices = list(best.decisions.choices)
                if option == choices[number] or trials <= 0:
                    continue
                trials -= 1
                choices[number] = option
                changed = evaluate(recording, choices, link, budget)
                if changed is not None and changed.seconds < best.seconds:
                    best, has_changed = changed, True
    return best
