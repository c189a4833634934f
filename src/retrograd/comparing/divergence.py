"""Where two runs part, beyond what noise does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from retrograd.comparing.distance import Distances, FloatArray
from retrograd.comparing.floor import GROWTH, UPDATE, Floor
from retrograd.comparing.pairs import Pairs
from retrograd.history.sink import PHASES, Moment


@dataclass(frozen=True, slots=True)
class Divergence:
    """A site at one moment, of which the two runs have recorded different numbers.

    Attributes:
        site: its name.
        moment: when.
        rank: in which process.
        distance: how far they are apart, relative to the size of the tensor.
        limit: how far they may be by noise.
        a, b: root mean squares in both.
    """

    site: str
    moment: Moment
    rank: int
    distance: float
    limit: float
    a: float
    b: float

    @property
    def step(self) -> int:
        """The step."""
        return self.moment.step

    def __str__(self) -> str:
        moment = self.moment
        micro = f", micro-batch {moment.micro}" if moment.micro else ""
        phase = f", {moment.phase}" if moment.phase != "train" else ""
        rank = f" on rank {self.rank}" if self.rank else ""
        return f"{self.site} at step {moment.step}{micro}{phase}{rank}"


def find_first(pairs: Pairs, distances: Distances) -> int | None:
    """The first pair that is not the same, to the last bit."""
    return _first(~distances.is_same)


def find_parting(pairs: Pairs, distances: Distances, floor: Floor) -> int | None:
    """The first pair that is farther apart than noise makes it.

    Where noise is only estimated, what grows step by step out of rounding is noise, too: a pair counts only when it
    is farther apart than anything that was reached before it could have made it.
    """
    over = distances.usual > floor.limits
    if floor.is_measured:
        return _first(over)
    before = np.maximum.accumulate(np.r_[0.0, distances.usual])[:-1]
    over &= distances.usual > GROWTH * before
    return _first(over & (distances.usual > _limit_of_updates(pairs, distances)))


def _limit_of_updates(pairs: Pairs, distances: Distances) -> FloatArray:
    """For updates of parameters whose gradient has not been the same: how far they may be apart."""
    limits = np.zeros(len(pairs))
    numbers = {name: number for number, name in enumerate(pairs.names)}
    for name, number in numbers.items():
        gradient = numbers.get(f"{name.removesuffix('.update')}.grad")
        if not name.endswith(".update") or gradient is None:
            continue
        own, theirs = (np.flatnonzero(pairs.site == each) for each in (number, gradient))
        if len(theirs):
            largest = np.maximum.accumulate(distances.own[theirs])
            differed = ~np.logical_and.accumulate(distances.is_same[theirs])
            place = np.maximum(np.searchsorted(theirs, own) - 1, 0)
            limits[own] = np.where(differed[place], np.maximum(UPDATE, GROWTH * largest[place]), 0.0)
    return limits


def describe_pair(pairs: Pairs, distances: Distances, floor: Floor, place: int) -> Divergence:
    """One pair in words and numbers."""
    a = int(pairs.a[place])
    rows = pairs.rows_a
    moment = Moment(
        int(rows["step"][a]), int(rows["micro"][a]), int(rows["backward"][a]), PHASES[int(rows["phase"][a])]
    )
    sizes = [_size(each, int(index[place])) for each, index in ((pairs.rows_a, pairs.a), (pairs.rows_b, pairs.b))]
    return Divergence(
        pairs.names[int(pairs.site[place])],
        moment,
        int(rows["rank"][a]),
        float(distances.usual[place]),
        float(floor.limits[place]),
        *sizes,
    )


def _size(rows: object, index: int) -> float:
    count, total, m2 = (float(rows[name][index]) for name in ("count", "sum", "m2"))  # type: ignore[index]
    return float(np.sqrt(m2 / count + (total / count) ** 2)) if count else 0.0


def _first(which: npt.NDArray[np.bool_]) -> int | None:
    return int(np.argmax(which)) if which.any() else None
