"""The noise floor: how far two runs of the same program are apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from retrograd.comparing.distance import FORMATS, SINGLE, UNKNOWN, FloatArray, find_formats, measure, split_by_site
from retrograd.comparing.pairs import IntArray, Pairs, pair_rows
from retrograd.history.history import History

ROUNDINGS = 8
"""Times the epsilon of a format: what rounding alone may make of sums in another order. Ours, and not measured by
itself."""
GROWTH = 30
"""Times: by how much one operation, or one step, makes what was apart before it grow. Ours."""
UPDATE = 0.2
"""By how much an update may be apart whose gradient is not the same to the last bit: optimizers divide by the size of
gradients, also of those elements that are nothing but rounding. Ours; 0.003 was measured for the bias of a key."""
SPREAD = 10
"""Times: how much farther apart than the repeated runs two runs of the same program may come. Ours."""


class Floor:
    """How far pairs may be apart by noise alone.

    Args:
        pairs: of the two runs.
        first: the record of the first.
        repeats: records of runs of the same program; none: it is estimated.
        known: names of the formats of numbers that occur in each; empty where that is not known.

    Attributes:
        words: where it comes from.
        is_measured: it comes from repeated runs.
        limits: for each pair. Where the two have different formats anywhere, the coarsest counts for all: modules round
            inside, too.
        formats: for each site the format in both runs, as numbers of :data:`FORMATS`.
        is_other: for each site whether both are known, and are not the same.
    """

    def __init__(
        self,
        pairs: Pairs,
        first: History,
        repeats: Sequence[History] = (),
        known: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset()),
    ) -> None:
        self.formats = find_formats(pairs, known)
        one, other = self.formats
        self.is_other = (one != other) & (np.minimum(one, other) != UNKNOWN)
        known_ones = np.concatenate([each[each != UNKNOWN] for each in self.formats])
        self._coarsest = int(known_ones.min()) if len(known_ones) else SINGLE
        coarsest = np.where(np.minimum(one, other) == UNKNOWN, _finest(known_ones), np.minimum(one, other))
        is_other = bool(self.is_other.any())
        met = np.minimum.accumulate(coarsest[pairs.site]) if not is_other else np.full(len(pairs), self._coarsest)
        self.limits: FloatArray = ROUNDINGS * np.array([each.epsilon for each in FORMATS])[met]
        self.is_measured = bool(repeats)
        if repeats:
            measured = SPREAD * _measure_repeats(pairs, first, repeats)
            rounds = is_other or bool(measured.any())  # where repeated runs are the same to the last bit, any two are
            self.limits = np.maximum(self.limits, measured) if rounds else measured

    @property
    def words(self) -> str:
        """Where it comes from."""
        if self.is_measured:
            return "noise measured by repeated runs"
        return f"rounding of {FORMATS[self._coarsest].name}, estimated"


def _finest(formats: IntArray) -> int:
    """The finest of those that are known; float32 where none is."""
    return int(formats.max()) if len(formats) else SINGLE


def _measure_repeats(pairs: Pairs, first: History, repeats: Sequence[History]) -> FloatArray:
    """How far the repeated runs are from the first and from each other: for each pair, the most so far at its site."""
    floor = np.zeros(len(pairs))
    known = [first, *repeats]
    for number, one in enumerate(known):
        for other in known[number + 1 :]:
            paired = pair_rows(one, other)
            _raise_to(floor, pairs, paired, measure(paired).usual)
    for places in split_by_site(pairs):
        floor[places] = np.maximum.accumulate(floor[places])
    return floor


def _raise_to(floor: FloatArray, pairs: Pairs, paired: Pairs, distances: FloatArray) -> None:
    """Take the largest distance of each site and step."""
    site_of = {name: number for number, name in enumerate(pairs.names)}
    site = np.array([site_of.get(name, -1) for name in paired.names], np.int64)[paired.site]
    steps = pairs.of_a("step").max(initial=0) + 1
    step = paired.of_a("step")
    usable = (site >= 0) & (step < steps)
    largest = np.zeros(len(pairs.names) * steps)
    np.maximum.at(largest, site[usable] * steps + step[usable], distances[usable])
    np.maximum(floor, largest[pairs.site * steps + pairs.of_a("step")], out=floor)
