"""Distances of rows, the number formats of their tensors, and the distance that noise allows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from retrograd.core.history.history import History
from retrograd.core.history.steps import number_steps
from retrograd.explaining.comparing.pairs import IntArray, Pairing, Pairs

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


class Meter:
    """Measures pairs, some steps after the others.

    Args:
        names: of the sites.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._largest = np.zeros(len(names))
        """Of each site the largest size so far."""
        self._is_gradient = np.array([name.endswith(".grad") and not _is_output(name) for name in names], np.bool_)

    def measure(self, pairs: Pairs) -> Distances:
        """The largest of the distances of mean, root mean square, mean size, smallest and largest element.

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
        usual = np.maximum(size, self._find_usual(pairs, size))
        found = [np.divide(apart, scale, out=np.zeros(len(pairs)), where=scale > 0) for scale in (size, usual)]
        for each in found:
            each[is_same] = 0.0
            each[differs] = np.inf
        return Distances(found[0], found[1], is_same)

    def _find_usual(self, pairs: Pairs, size: FloatArray) -> FloatArray:
        """The largest size so far, of each site; of gradients of parameters, the largest in their step."""
        usual = size.copy()
        picked = np.flatnonzero(self._is_gradient[pairs.site])
        if len(picked):
            steps = pairs.of_a("step")[picked]
            begins = np.flatnonzero(np.diff(steps, prepend=steps[0] - 1))
            largest = np.maximum.reduceat(size[picked], begins)
            usual[picked] = np.repeat(largest, np.diff(begins, append=len(picked)))
        pairs.raise_by_site(usual, self._largest)
        return usual


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


def _is_output(name: str) -> bool:
    return ":output" in name or ":input" in name or name.startswith("watch/")


class Formats:
    """Finds for each site the coarsest of :data:`FORMATS` that holds all its recorded extremes, in both records.

    The extremes of a bfloat16 tensor are exact in bfloat16; those of other tensors are so by chance, once in 65,536.
    Updates show no format: they are differences of numbers that are close to each other.

    Args:
        names: of the sites.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._is_update = np.array([name.endswith(".update") for name in names], np.bool_)
        self._fits = np.ones((2, len(FORMATS), len(names)), np.bool_)
        self._telling = np.zeros((2, len(names)), np.int64)

    def add(self, pairs: Pairs) -> None:
        """Take in the extremes of some pairs."""
        for which, fits, telling in zip((0, 1), self._fits, self._telling, strict=True):
            for values in (pairs.column("min", which), pairs.column("max", which)):
                finite = np.isfinite(values)
                asked = np.flatnonzero(finite & (telling < _TELLING)[pairs.site])
                asked = asked[~_is_plain(values[asked])]
                np.add.at(telling, pairs.site[asked], 1)
                for number, holds in enumerate(_HOLDING):
                    asked = np.flatnonzero(
                        finite & fits[number][pairs.site]
                    )  # most often none: another one has not fit
                    fits[number][pairs.site[asked[~holds(values[asked])]]] = False

    def find(self, known: tuple[frozenset[str], frozenset[str]]) -> tuple[IntArray, IntArray]:
        """Numbers of formats; :data:`UNKNOWN` where all extremes are plain numbers such as 0 or 6, which fit any.

        Args:
            known: names of the formats that occur in each of the records; empty where that is not known.
        """
        found = []
        for fits, telling, names in zip(self._fits, self._telling, known, strict=True):
            may_be = [not names or each.name in names for each in FORMATS[:-1]]
            coarsest = np.argmax(fits & np.array([*may_be, True])[:, None], axis=0)
            found.append(np.where((telling >= _TELLING) & ~self._is_update, coarsest, UNKNOWN))
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


_HOLDING: tuple[Callable[[FloatArray], npt.NDArray[np.bool_]], ...] = (
    _fits_bfloat16,
    partial(_fits, dtype=np.float16),
    partial(_fits, dtype=np.float32),
)
"""Whether numbers are exact in all of :data:`FORMATS` but the last, which holds any."""


class Floor:
    """The noise floor: the distance of pairs that noise alone allows.

    What rounding allows is known when all pairs were taken in. Where the two have different formats anywhere, the
    coarsest counts for all: modules round inside, too.

    Args:
        names: of the sites.
        known: names of the number formats that occur in each run; empty where that is not known.
        repeats: measures the noise; None where it is estimated.

    Attributes:
        firsts: of each site the place of its first pair among all, and its step; the largest number where it has none.
    """

    def __init__(
        self, names: Sequence[str], known: tuple[frozenset[str], frozenset[str]], repeats: Repeats | None
    ) -> None:
        self._known, self._repeats = known, repeats
        self._found, self._rounds = Formats(names), False
        self._count = 0
        self.firsts = np.full((2, len(names)), np.iinfo(np.int64).max)

    def add(self, pairs: Pairs) -> FloatArray:
        """Take in the next pairs; returns the distance of each that was measured of repeated runs, else 0."""
        self._found.add(pairs)
        is_new = np.flatnonzero((self.firsts[0] > self._count)[pairs.site])
        sites, first = np.unique(pairs.site[is_new], return_index=True)
        self.firsts[:, sites] = self._count + is_new[first], pairs.of_a("step")[is_new[first]]
        self._count += len(pairs)
        if self._repeats is None:
            return np.zeros(len(pairs))
        measured = self._repeats.measure(pairs)
        self._rounds = self._rounds or bool(measured.any())
        return measured

    @cached_property
    def formats(self) -> tuple[IntArray, IntArray]:
        """For each site the format in both runs, as numbers of :data:`FORMATS`."""
        return self._found.find(self._known)

    @cached_property
    def is_other(self) -> npt.NDArray[np.bool_]:
        """For each site whether both formats are known and differ."""
        one, other = self.formats
        return np.asarray((one != other) & (np.minimum(one, other) != UNKNOWN))

    @property
    def is_measured(self) -> bool:
        """Whether it comes from repeated runs."""
        return self._repeats is not None

    @property
    def words(self) -> str:
        """Source of the floor."""
        if self.is_measured:
            return "noise measured by repeated runs"
        return f"rounding of {FORMATS[self._coarsest].name}, estimated"

    def limit(self, places: npt.NDArray[np.int64], measured: FloatArray) -> FloatArray:
        """The allowed distance of pairs.

        Args:
            places: theirs among all.
            measured: their distances in repeated runs.
        """
        if self.is_measured and not self._rounds and not self.is_other.any():
            return measured  # where repeated runs are the same to the last bit, any two are
        order, met = self._met
        found = met[np.maximum(np.searchsorted(order, places, "right") - 1, 0)]
        return np.asarray(np.maximum(ROUNDINGS * np.array([each.epsilon for each in FORMATS])[found], measured))

    @cached_property
    def _coarsest(self) -> int:
        known = self._list_known()
        return int(known.min()) if len(known) else SINGLE

    def _list_known(self) -> IntArray:
        return np.concatenate([each[each != UNKNOWN] for each in self.formats])

    @cached_property
    def _met(self) -> tuple[IntArray, IntArray]:
        """The places of the first pairs of sites, rising, and the coarsest format up to each of them."""
        known, least = self._list_known(), np.minimum(*self.formats)
        finest = int(known.max()) if len(known) else SINGLE
        order = np.argsort(self.firsts[0])
        met = np.minimum.accumulate(np.where(least == UNKNOWN, finest, least)[order])
        return self.firsts[0][order], np.full(len(met), self._coarsest) if self.is_other.any() else met


class Repeats:
    """Measures the noise of pairs: the largest distance so far at their site among a run and repeated ones.

    Args:
        names: of the sites.
        first: the record of the run.
        repeats: records of runs of the same program.
    """

    def __init__(self, names: Sequence[str], first: History, repeats: Sequence[History]) -> None:
        self._largest, self._known = np.zeros(len(names)), []
        for one, other in itertools.combinations((first, *repeats), 2):
            pairing = Pairing(one, other)
            number_of = {name: number for number, name in enumerate(names)}
            sites = np.array([number_of.get(name, -1) for name in pairing.names], np.int64)
            self._known.append((pairing, Meter(pairing.names), sites))

    def measure(self, pairs: Pairs) -> FloatArray:
        """The noise of the next pairs: :data:`SPREAD` times what repeated runs differ by."""
        steps, step = number_steps(pairs.of_a("step"))
        largest = np.zeros(len(pairs.names) * len(steps))
        for pairing, meter, sites in self._known:
            paired = pairing.between(*pairs.steps)
            distances, site = meter.measure(paired).usual, sites[paired.site]
            usable = np.flatnonzero((site >= 0) & np.isin(paired.of_a("step"), steps))
            place = np.searchsorted(steps, paired.of_a("step")[usable])
            np.maximum.at(largest, site[usable] * len(steps) + place, distances[usable])
        found = largest[pairs.site * len(steps) + step]
        pairs.raise_by_site(found, self._largest)
        return np.asarray(SPREAD * found)
