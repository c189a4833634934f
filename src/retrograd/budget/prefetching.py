"""When what has left is brought back: as late as the link allows, and not before there is room for it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from retrograd.budget.simulation import Decisions, Link, Recording, find_spans

_HASTE = 2.0
"""Copies back begin so many times their own duration before they have to, since links and clocks are not steady."""


def schedule_fetches(
    recording: Recording,
    decisions: Decisions,
    departures: Mapping[int, int],
    held: npt.NDArray[np.int64],
    link: Link,
    budget: int,
) -> dict[int, int]:
    """After which request each stretch is brought back.

    Args:
        recording: the pass.
        decisions: what becomes of its stretches.
        departures: what leaves, and when.
        held: bytes at each position if everything is brought back when it is asked for.
        link: its speed.
        budget: bytes that must not be exceeded at any position.

    Returns:
        Stretch → position of a first request, as in :attr:`Decisions.fetches`.
    """
    held = held.copy()
    times = np.cumsum(recording.seconds)
    triggers_at = {stretch.asked for stretch in recording.stretches if stretch.asked is not None}
    triggers = sorted(triggers_at)
    spans = find_spans(recording, decisions.choices)
    asked = [(at, number) for number in departures if (at := spans.needed[number]) in triggers_at]
    fetches: dict[int, int] = {}
    busy_from = float("inf")
    for needed, number in sorted(asked, reverse=True):
        nbytes = recording.stretches[number].nbytes
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


def with_fetches(decisions: Decisions, fetches: Mapping[int, int]) -> Decisions:
    """The same decisions, with these."""
    return Decisions(decisions.choices, decisions.window, fetches)
