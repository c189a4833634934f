"""Choose where each stretch of memory waits, so that a budget is kept at every position, at the least time.

Every plan that is considered is simulated as a whole. What is returned has been checked at each position, so that a
poor guess costs time and never the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from retrograd.budget.orders import Move, list_moves, list_orders, list_steady_orders, with_pushes
from retrograd.budget.prediction import predict_seconds
from retrograd.budget.prefetching import schedule_fetches, with_fetches
from retrograd.budget.simulation import Choice, Decisions, Link, Recording, count_residency, find_departures

_TRIALS = 1000
"""Simulations spent on improving a plan: a second or two for a ResNet-152."""
_WINDOW_SHARE = 8
_PRECISION = 256
"""The smallest budget is found up to such a part of what is held if everything is kept."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Decisions and what comes of them.

    Attributes:
        decisions: what becomes of each stretch.
        peak: bytes held at the worst position.
        seconds: how long the pass takes.
    """

    decisions: Decisions
    peak: int
    seconds: float


def window_of(budget: int) -> int:
    """Bytes that may be on their way out under a budget: an eighth of it."""
    return budget // _WINDOW_SHARE


def keep_all(recording: Recording) -> Solution:
    """What happens without a plan."""
    keep: Choice = "keep"
    decisions = Decisions((keep,) * len(recording.stretches), 0)
    peak = int(count_residency(recording, decisions, {}).max(initial=recording.background))
    return Solution(decisions, peak, sum(recording.seconds))


def evaluate(recording: Recording, choices: Sequence[Choice], link: Link, budget: int) -> Solution | None:
    """The best that can be made of some choices; None if they exceed the budget."""
    decisions = Decisions(tuple(choices), window_of(budget))
    departures = find_departures(recording, decisions)
    held = count_residency(recording, decisions, departures)
    if held.max(initial=recording.background) > budget:
        return None
    decisions = with_fetches(decisions, schedule_fetches(recording, decisions, departures, held, link, budget))
    peak = int(count_residency(recording, decisions, departures).max(initial=recording.background))
    return Solution(decisions, peak, predict_seconds(recording, decisions, departures, link))


def find_plan(recording: Recording, link: Link, budget: int, trials: int = _TRIALS) -> Solution | None:
    """The fastest plan found that holds no more than the budget at any position.

    Stretches are moved in several orders, in each as few as suffice; then, in the fastest of these plans, single
    choices are taken back or changed as long as that saves time.

    Args:
        recording: the pass.
        link: its speed.
        budget: bytes.
        trials: how many changes to try.

    Returns:
        The plan; None where no order of moving leads under the budget.
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


def find_smallest(recording: Recording, link: Link) -> int:
    """The smallest budget, in bytes, for which :func:`find_plan` finds a plan."""
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


def _move_few(recording: Recording, order: list[Move], link: Link, budget: int) -> Solution | None:
    """Move as few as suffice, in this order."""
    order = with_pushes(recording, order)

    def solve(count: int) -> Solution | None:
        choices: list[Choice] = ["keep"] * len(recording.stretches)
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


def _improve(recording: Recording, best: Solution, link: Link, budget: int, trials: int) -> Solution:
    """Change one choice at a time while that saves time, the largest stretches first."""
    numbers = sorted(range(len(recording.stretches)), key=lambda number: -recording.stretches[number].nbytes)
    options: dict[int, list[Choice]] = {
        number: ["keep", *(choice for _, choice in list_moves(number, recording.stretches[number]))]
        for number in numbers
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
