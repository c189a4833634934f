"""What a part of statistics must be to be read, whoever has written it: checked once, where it is read.

What is not so is a ``ValueError``, by which the file, or its row group, is told to be damaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from retrograd.core.history.outline import IntArray
from retrograd.core.history.rows import Columns
from retrograd.core.history.table import STATISTICS_COLUMNS
from retrograd.core.runs.part_outline import PHASE_CODES
from retrograd.core.statistics.row import BINS, COUNTS

_TYPES = {column.name: column.type for column in STATISTICS_COLUMNS}
_MAY_LACK = frozenset({"order"})
"""Columns of whole numbers that rows have not always had."""
_COUNTS = frozenset({"calls", *COUNTS})
MOST_STEPS = 1 << 53
"""No step that training comes to has a larger number."""


@cache
def check_types(schema: pa.Schema) -> None:
    """Check the types of all columns, by their kinds: another tool may have made 64 bits of 32.

    Raises:
        ValueError: one is of another kind; a user's statistic is a number.
    """
    for field in schema:
        if not _is_alike(field.type, _TYPES.get(field.name, pa.float64())):
            raise ValueError(f"column {field.name!r} is of the type {field.type}")


def _is_alike(given: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_dictionary(wanted):
        given = given.value_type if pa.types.is_dictionary(given) else given
        return bool(pa.types.is_string(given) or pa.types.is_large_string(given))
    if pa.types.is_list(wanted):
        return bool(pa.types.is_list(given) and pa.types.is_integer(given.value_type))
    if pa.types.is_integer(wanted):
        return bool(pa.types.is_integer(given))
    return bool(pa.types.is_floating(given) or pa.types.is_integer(given))


def check_column(name: str, column: pa.ChunkedArray) -> None:
    """Check that each row has a value, but for numbers with a point: of these a missing one is NaN.

    Raises:
        ValueError: one lacks it.
    """
    wanted = _TYPES.get(name, pa.float64())
    if column.null_count and name not in _MAY_LACK and not pa.types.is_floating(wanted):
        raise ValueError(f"a row has no {name!r}")


def check_rows(columns: Columns, sites: npt.NDArray[np.integer], runs: Mapping[int, IntArray]) -> None:
    """Check rows against what their file is known to hold.

    Args:
        columns: some of the rows'.
        sites: codes of the sites that the file has, rising.
        runs: for each phase the steps that it has, as runs of even gaps.

    Raises:
        ValueError: a row is of another site, phase or step, counts less than nothing, or its histogram has exponents
            that no number has.
    """
    if "site" in columns and not np.isin(columns["site"], sites).all():
        raise ValueError("a row is of a site that the file does not name")
    if "step" in columns:
        check_steps(columns["step"])
    if "phase" in columns:
        _check_moments(columns, runs)
    for name in _COUNTS & columns.keys():
        if len(columns[name]) and columns[name].min() < 0:
            raise ValueError(f"column {name!r} has {columns[name].min()}; expected 0 or more")
    if "first_bin" in columns:
        first = columns["first_bin"].astype(np.int64)
        last = first + columns.get("bin_count", 0)
        if len(first) and (first.min() < 0 or last.max() > BINS):
            raise ValueError("a row has exponents beyond those of numbers")


def _check_moments(columns: Columns, runs: Mapping[int, IntArray]) -> None:
    phase = columns["phase"]
    found = np.flatnonzero(np.bincount(phase)).tolist()
    check_phases(found)
    for code in found:
        if "step" in columns and not are_in_runs(runs.get(code), columns["step"][phase == code]):
            raise ValueError("a row is of a step that the file does not name")


def check_phases(codes: Iterable[int]) -> None:
    """Check codes of phases.

    Raises:
        ValueError: there is no such phase.
    """
    if max(codes, default=0) >= len(PHASE_CODES):
        raise ValueError(f"column 'phase' has a phase that there is not; expected {', '.join(PHASE_CODES)}")


def find_phase(name: str) -> int:
    """The code of a phase.

    Raises:
        ValueError: there is no such phase.
    """
    if name not in PHASE_CODES:
        raise ValueError(f"column 'phase' has {name!r:.60}; expected {', '.join(PHASE_CODES)}")
    return PHASE_CODES[name]


def check_steps(steps: npt.NDArray[np.integer]) -> None:
    """Check that steps can be numbers of steps.

    Raises:
        ValueError: one cannot.
    """
    if len(steps) and (steps.min() < 0 or steps.max() > MOST_STEPS):
        found = steps.min() if steps.min() < 0 else steps.max()
        raise ValueError(f"column 'step' has {found}; expected 0 to {MOST_STEPS}")


def are_in_runs(runs: IntArray | None, steps: IntArray) -> bool:
    """Return whether all of these steps are among those of some runs: ``first, last, gap``, rising."""
    if runs is None or not len(runs):
        return not len(steps)
    low, high, gap = runs.T
    at = np.searchsorted(low, steps, "right") - 1
    return bool(((at >= 0) & (steps <= high[at]) & ((steps - low[at]) % gap[at] == 0)).all())
