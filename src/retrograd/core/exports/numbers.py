"""What trackers are sent of a record: numbers by step, and histograms; of long runs those of evenly spaced steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import groupby
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from retrograd.core.exports.tracker import Exponents
from retrograd.core.history.history import History
from retrograd.core.history.rows import encode_phase
from retrograd.core.history.scalar_names import EVAL_LOSS
from retrograd.core.history.scalars import Scalars
from retrograd.core.history.sink import Phase
from retrograd.core.sites.site import parse_leniently
from retrograd.core.statistics.row import EXPONENT_BIAS

StepArray = npt.NDArray[np.int64]
Numbers = tuple[int, dict[str, float]]
"""A step, and numbers by name."""

_FEW = 1000
_NO_STEPS = np.empty(0, np.int64)


def read_numbers(
    history: History,
    sites: Sequence[str],
    statistics: Sequence[str],
    phase: Phase,
    steps: StepArray,
    scalars: Scalars | None = None,
    limits: tuple[int, int] | None = None,
) -> Iterator[Numbers]:
    """Scalars by their names, and each statistic of each site as ``rms/SITE``, by rising step.

    Losses of evaluations, and what the program has logged, are given at all of their steps where these are few.

    Args:
        history: of the run, of which some steps are held at a time where it is long.
        sites: names.
        statistics: names; ``update_ratio`` is given of updates alone.
        phase: kind of forward.
        steps: which steps, rising.
        scalars: those of the run; of ``history`` when left out.
        limits: the first and the last step of scalars; None for all.

    Raises:
        StatisticError: for a statistic that was not recorded.
    """
    numbers = _read_sites(history, sites, statistics, phase, steps) if len(sites) else iter(())
    told = _read_scalars(history.scalars if scalars is None else scalars, steps, limits)
    for step, found in groupby(merge(told, numbers, key=itemgetter(0)), key=itemgetter(0)):
        yield step, {name: value for _, several in found for name, value in several.items()}


def read_histograms(
    history: History, sites: Sequence[str], phase: Phase, chosen: StepArray
) -> Iterator[tuple[int, str, Exponents]]:
    """The histograms of each site as ``exponents/SITE``, one site after the other, with their steps; as above."""

    def place(steps: StepArray) -> StepArray:
        """The column of each step; all that are not chosen share the last one."""
        at = np.searchsorted(chosen, steps)
        return np.where(np.isin(steps, chosen), at, len(chosen))

    for site, counts in zip(sites, history.add_exponents(sites, phase, place, len(chosen) + 1), strict=True):
        for step, count in zip(chosen.tolist(), counts[:-1], strict=True):
            used = np.flatnonzero(count)
            if len(used):
                first, last = int(used[0]), int(used[-1]) + 1
                limits = np.arange(first, last + 1, dtype=np.float64) - EXPONENT_BIAS
                yield step, f"exponents/{site}", Exponents(limits, count[first:last])


def list_steps(history: History, phase: Phase) -> StepArray:
    """Steps that have a loss, or rows of a phase, rising."""
    return np.union1d(history.loss.steps, list_row_steps(history, phase))


def list_row_steps(history: History, phase: Phase) -> StepArray:
    """Steps that have rows of a phase, rising."""
    return history.outline.steps.get(encode_phase(phase), _NO_STEPS)


def spread_steps(steps: StepArray, most: int) -> StepArray:
    """At most so many of some steps, evenly spaced, the first and the last among them."""
    if len(steps) <= most:
        return steps
    return steps[np.unique(np.linspace(0, len(steps) - 1, most).astype(np.int64))]


def _read_scalars(scalars: Scalars, chosen: StepArray, limits: tuple[int, int] | None) -> Iterator[Numbers]:
    by_step: dict[int, dict[str, float]] = {}
    for name, curve in scalars.items():
        there = np.isin(curve.steps, chosen)
        if len(curve.steps) <= _FEW and (name == EVAL_LOSS or scalars.is_logged(name)):
            first, last = limits or (0, int(curve.steps[-1]))
            there = (curve.steps >= first) & (curve.steps <= last)
        for step, value in zip(curve.steps[there].tolist(), curve.values[there].tolist(), strict=True):
            by_step.setdefault(step, {})[name] = value
    yield from sorted(by_step.items())


def _read_sites(
    history: History, sites: Sequence[str], statistics: Sequence[str], phase: Phase, chosen: StepArray
) -> Iterator[Numbers]:
    updates = np.array([parse_leniently(site).quantity == "update" for site in sites], np.bool_)
    for counts, *matrices in history.matrices(("count", *statistics), sites, phase):
        for column in np.flatnonzero(np.isin(counts.steps, chosen)).tolist():
            there = counts.values[:, column] > 0  # NaN where nothing was recorded
            numbers: dict[str, float] = {}
            for statistic, matrix in zip(statistics, matrices, strict=True):
                values = matrix.values[:, column]
                for row in np.flatnonzero(there & updates if statistic == "update_ratio" else there).tolist():
                    numbers[f"{statistic}/{sites[row]}"] = float(values[row])
            yield int(counts.steps[column]), numbers
