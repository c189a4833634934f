"""How far two rows are apart, and in which format of numbers their tensors were."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from retrograd.comparing.pairs import IntArray, Pairs

FloatArray = npt.NDArray[np.float64]

_EXACT = ("calls", "count", "nan", "pos_inf", "neg_inf", "zeros", "sum", "m2", "abs_sum", "min", "max", "reference")
_COUNTS = ("nan", "pos_inf", "neg_inf")


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
"""Numbers of formats: of none, and of float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Distances:
    """How far the rows of pairs are apart.

    Attributes:
        own: relative to the size of the tensor itself.
        usual: relative to the size that tensors of this site have had so far, and gradients of parameters to the
            largest of their step: what is left of a gradient where summands cancel is rounding, of any relative size.
        is_same: all that was recorded is the same, to the last bit.
    """

    own: FloatArray
    usual: FloatArray
    is_same: npt.NDArray[np.bool_]


def measure(pairs: Pairs) -> Distances:
    """Distances of all pairs: the largest of those of mean, root mean square, mean size, smallest and largest element.

    What is finite in one alone, or of another shape, is at an infinite distance.
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
    moments = [_moments(pairs, number) for number in (0, 1)]
    apart = np.zeros(len(pairs))
    for one, other in zip(*moments, strict=True):
        np.maximum(apart, np.abs(one - other), out=apart)
    size = np.maximum(moments[0][1], moments[1][1])
    largest = np.zeros(len(pairs))
    ends = np.zeros(len(pairs))
    for name in ("min", "max"):
        one, other = (np.where(np.isfinite(each), each, 0.0) for each in pairs.columns(name))
        np.maximum(ends, np.abs(one - other), out=ends)
        np.maximum(largest, np.maximum(np.abs(one), np.abs(other)), out=largest)
    share = np.divide(ends, largest, out=np.zeros(len(pairs)), where=largest > 0)
    return np.maximum(apart, share * size), size


def _moments(pairs: Pairs, which: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Mean, root mean square and mean size."""
    count, nan, above, below, total, m2, sizes = (
        pairs.columns(name)[which].astype(np.float64)
        for name in ("count", "nan", "pos_inf", "neg_inf", "sum", "m2", "abs_sum")
    )
    n = np.maximum(count - nan - above - below, 1.0)
    mean = total / n
    return mean, np.sqrt(np.maximum(m2 / n + mean * mean, 0.0)), sizes / n


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
    """For each site the coarsest of :data:`FORMATS` that holds all extremes recorded of it, in both records.

    Tensors in bfloat16 have extremes that bfloat16 holds exactly; those of others do so by chance, once in 65,536.
    Updates tell nothing: they are differences of numbers that are close to each other.

    Args:
        pairs: the rows.
        known: names of the formats that occur in each of the records; empty where that is not known.

    Returns:
        Numbers of formats; :data:`UNKNOWN` where all extremes are plain numbers such as 0 or 6, which tell nothing.
    """
    found = []
    is_update = np.array([name.endswith(".update") for name in pairs.names], np.bool_)
    for which in (0, 1):
        fits = np.ones((len(FORMATS), len(pairs.names)), np.bool_)
        telling = np.zeros(len(pairs.names), np.int64)
        for name in ("min", "max"):
            values = pairs.columns(name)[which]
            finite = np.isfinite(values)
            telling += np.bincount(pairs.site[finite & ~_is_plain(values)], minlength=len(pairs.names))
            for number, holds in enumerate((_fits_bfloat16, _fits_float16, _fits_float32)):
                breaks = np.bincount(pairs.site[finite & ~holds(values)], minlength=len(pairs.names))
                fits[number] &= breaks == 0
        for number, each in enumerate(FORMATS[:-1]):
            fits[number] &= not known[which] or each.name in known[which]
        telling[is_update] = 0
        found.append(np.where(telling >= _TELLING, np.argmax(fits, axis=0), UNKNOWN))
    return found[0], found[1]


_TELLING = 2
"""Extremes that are no plain numbers, for a format to be told by."""


def _is_plain(values: FloatArray) -> npt.NDArray[np.bool_]:
    """Whether a number needs no more than three bits behind the first, as 0, 6 or 1/32 do."""
    mantissa, _ = np.frexp(values)
    return np.asarray(mantissa * 16 == np.rint(mantissa * 16))


def _fits_bfloat16(values: FloatArray) -> npt.NDArray[np.bool_]:
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    return np.asarray((single == values) & (single.view(np.int32) & 0xFFFF == 0))


def _fits_float16(values: FloatArray) -> npt.NDArray[np.bool_]:
    with np.errstate(over="ignore"):
        return np.asarray(values.astype(np.float16) == values)


def _fits_float32(values: FloatArray) -> npt.NDArray[np.bool_]:
    with np.errstate(over="ignore"):
        return np.asarray(values.astype(np.float32) == values)
