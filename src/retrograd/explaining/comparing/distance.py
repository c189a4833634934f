"""Distances of rows, the number formats of their tensors, and the distance that noise allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from retrograd.core.history.history import History
from retrograd.explaining.comparing.pairs import IntArray, Pairs, pair_rows

FloatArray = npt.NDArray[np.float64]

_EXACT = ("calls", "count", "nan", "pos_inf", "neg_inf", "zeros", "sum", "m2", "abs_sum", "min", "max", "reference")
_COUNTS = ("nan", "pos_inf", "neg_inf")

ROUNDINGS = 8
"""Distance, in epsilons of a format, that rounding alone may cause in sums of another order. Ours, not measured."""
GROWTH = 30
"""Factor by which one operation, or one step, may increase an existing distance. Ours."""
UPDATE = 0.2
"""Allowed distance of an update whose gradient differs in any bit: optimizers divide by the size of gradients, even of
elements that are nothing but rounding. Ours; 0.003 was measured for the bias of a key."""
SPREAD = 10
"""Factor by which two runs of the same program may exceed the distance of the repeated runs. Ours."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format of numbers.

    Attributes:
        name: of the dtype.
        epsilon: the distance from one to the next larger number.
    """

    name: str
    epsilon: float


FORMATS = (
    Format("bfloat16", 2.0**-7),
    Format("float16", 2.0**-10),
    Format("float32", 2.0**-23),
    Format("float64", 2.0**-52),
)
"""The coarsest first."""

UNKNOWN = -1
SINGLE = 2
"""Numbers of formats: unknown, and float32."""

_TELLING = 2
"""Extremes, other than plain numbers, from which a format can be inferred."""


@dataclass(frozen=True, slots=True, eq=False)
class Distances:
    """Distances between the rows of pairs.

    Attributes:
        own: relative to the size of the tensor itself.
        usual: relative to the size that tensors of this site have had so far, and for gradients of parameters to the
            largest of their step: the remainder where summands cancel is rounding, of any relative size.
        is_same: whether the rows agree to the last bit.
    """

    own: FloatArray
    usual: FloatArray
    is_same: npt.NDArray[np.bool_]


def measure(pairs: Pairs) -> Distances:
    """Distances of all pairs: the largest of those of mean, root mean square, mean size, smallest and largest element.

    Rows with different numbers of elements, or of nonfinite ones, are infinitely far apart.
    """
    is_same = np.ones(len(pairs), np.bool_)
    differs = np.zeros(len(pairs), np.bool_)
    for name in _EXACT:
        one, other = pairs.columns(name)
        is_same &= one == other
        if name in (*_COUNTS, "count"):
            differs |= one != other
    apart, size = _measure_finite(pairs)
    usual = np.maximum(size, _usual_size(pairs, size))
    found = [np.divide(apart, scale, out=np.zeros(len(pairs)), where=scale > 0) for scale in (size, usual)]
    for each in found:
        each[is_same] = 0.0
        each[differs] = np.inf
    return Distances(found[0], found[1], is_same)


def _measure_finite(pairs: Pairs) -> tuple[FloatArray, FloatArray]:
    """Distances of the finite elements, absolute; and the larger root mean square of both."""
    ours, theirs = (_moments(pairs, number) for number in (0, 1))
    apart, size = np.zeros(len(pairs)), np.maximum(ours[1], theirs[1])
    while ours:  # they go one by one: each is as long as the record
        np.maximum(apart, np.abs(ours.pop() - theirs.pop()), out=apart)
    largest = np.zeros(len(pairs))
    ends = np.zeros(len(pairs))
    for name in ("min", "max"):
        one, other = (np.where(np.isfinite(each), each, 0.0) for each in pairs.columns(name))
        np.maximum(ends, np.abs(one - other), out=ends)
        np.maximum(largest, np.maximum(np.abs(one), np.abs(other)), out=largest)
    share = np.divide(ends, largest, out=np.zeros(len(pairs)), where=largest > 0)
    return np.maximum(apart, share * size), size


def _moments(pairs: Pairs, which: int) -> list[FloatArray]:
    """Mean, root mean square and mean size."""
    n = pairs.column("count", which).astype(np.float64)
    for name in _COUNTS:
        n -= pairs.column(name, which)
    np.maximum(n, 1.0, out=n)
    mean = pairs.column("sum", which) / n
    square = pairs.column("m2", which) / n
    square += mean * mean
    np.sqrt(np.maximum(square, 0.0, out=square), out=square)
    return [mean, square, pairs.column("abs_sum", which) / n]


def _usual_size(pairs: Pairs, size: FloatArray) -> FloatArray:
    """The largest size so far, of each site; of gradients of parameters, the largest in their step."""
    usual = size.copy()
    of_parameters = np.array([name.endswith(".grad") and not _is_output(name) for name in pairs.names], np.bool_)
    if of_parameters.any():
        picked = np.flatnonzero(of_parameters[pairs.site])
        steps = pairs.of_a("step")[picked]
        begins = np.flatnonzero(np.r_[True, steps[1:] != steps[:-1]]) if len(steps) else np.empty(0, np.int64)
        if len(begins):
            largest = np.maximum.reduceat(size[picked], begins)
            usual[picked] = np.repeat(largest, np.diff(np.r_[begins, len(picked)]))
    for places in split_by_site(pairs):
        usual[places] = np.maximum.accumulate(usual[places])
    return usual


def _is_output(name: str) -> bool:
    return ":output" in name or ":input" in name or name.startswith("watch/")


def split_by_site(pairs: Pairs) -> list[IntArray]:
    """The places of each site's pairs, in the order of execution."""
    order = np.argsort(pairs.site, kind="stable")
    ends = np.cumsum(np.bincount(pairs.site, minlength=len(pairs.names)))
    return [each for each in np.split(order, ends[:-1]) if len(each)] if len(order) else []


def find_formats(
    pairs: Pairs, known: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
) -> tuple[IntArray, IntArray]:
    """For each site, in both records, the coarsest of :data:`FORMATS` that holds all its recorded extremes.

    The extremes of a bfloat16 tensor are exact in bfloat16; those of other tensors are so by chance, once in 65,536.
    Updates show no format: they are differences of numbers that are close to each other.

    Args:
        pairs: the rows.
        known: names of the formats that occur in each of the records; empty where that is not known.

    Returns:
        Numbers of formats; :data:`UNKNOWN` where all extremes are plain numbers such as 0 or 6, which fit any format.
    """
    found = []
    is_update = np.array([name.endswith(".update") for name in pairs.names], np.bool_)
    for which in (0, 1):
        fits = np.ones((len(FORMATS), len(pairs.names)), np.bool_)
        telling = np.zeros(len(pairs.names), np.int64)
        for name in ("min", "max"):
            values = pairs.column(name, which)
            finite = np.isfinite(values)
            telling += np.bincount(pairs.site[finite & ~_is_plain(values)], minlength=len(pairs.names))
            held = (_fits_bfloat16(values), _fits(values, np.float16), _fits(values, np.float32))
            for number, holds in enumerate(held):
                breaks = np.bincount(pairs.site[finite & ~holds], minlength=len(pairs.names))
                fits[number] &= breaks == 0
        for number, each in enumerate(FORMATS[:-1]):
            fits[number] &= not known[which] or each.name in known[which]
        telling[is_update] = 0
        found.append(np.where(telling >= _TELLING, np.argmax(fits, axis=0), UNKNOWN))
    return found[0], found[1]


def _is_plain(values: FloatArray) -> npt.NDArray[np.bool_]:
    """Return whether a number needs at most three bits after the first, such as 0, 6 or 1/32."""
    mantissa, _ = np.frexp(values)
    return np.asarray(mantissa * 16 == np.rint(mantissa * 16))


def _fits_bfloat16(values: FloatArray) -> npt.NDArray[np.bool_]:
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    return np.asarray((single == values) & (single.view(np.int32) & 0xFFFF == 0))


def _fits(values: FloatArray, dtype: npt.DTypeLike) -> npt.NDArray[np.bool_]:
    with np.errstate(over="ignore"):
        return np.asarray(values.astype(dtype) == values)


class Floor:
    """The noise floor: the distance of pairs that noise alone allows.

    Args:
        pairs: pairs of the two runs.
        first: the record of the first run.
        repeats: records of runs of the same program; without any, the noise is estimated.
        known: names of the number formats that occur in each run; empty where that is not known.

    Attributes:
        words: source of the floor.
        is_measured: whether it comes from repeated runs.
        limits: allowed distance of each pair. Where the two have different formats anywhere, the coarsest counts for
            all: modules round inside, too.
        formats: for each site the format in both runs, as numbers of :data:`FORMATS`.
        is_other: for each site whether both formats are known and differ.
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
        """Source of the floor."""
        if self.is_measured:
            return "noise measured by repeated runs"
        return f"rounding of {FORMATS[self._coarsest].name}, estimated"


def _finest(formats: IntArray) -> int:
    """The finest known format; float32 where none is known."""
    return int(formats.max()) if len(formats) else SINGLE


def _measure_repeats(pairs: Pairs, first: History, repeats: Sequence[History]) -> FloatArray:
    """For each pair, the largest distance so far at its site among the first run and the repeated ones."""
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
    """Raise the floor to the largest distance of each site and step."""
    site_of = {name: number for number, name in enumerate(pairs.names)}
    site = np.array([site_of.get(name, -1) for name in paired.names], np.int64)[paired.site]
    steps = pairs.of_a("step").max(initial=0) + 1
    step = paired.of_a("step")
    usable = (site >= 0) & (step < steps)
    largest = np.zeros(len(pairs.names) * steps)
    np.maximum.at(largest, site[usable] * steps + step[usable], distances[usable])
    np.maximum(floor, largest[pairs.site * steps + pairs.of_a("step")], out=floor)
