"""Two runs, or two ranks of one, on the same axes: log₂ of the ratio of their rms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from retrograd.history.history import History
from retrograd.history.sink import Phase
from retrograd.views.downsample import FloatArray, IntArray
from retrograd.views.report.blocks import Block, Measure, make_block
from retrograd.views.report.scope import Scope

FURTHEST = 64.0
"""Ratios are cut off at 2 to the plus or minus this, where one of the two is zero."""


def compare_runs(scope: Scope, other: History, other_name: str) -> tuple[list[Block], dict[str, str]]:
    """The difference as a statistic of the page, and what the header says of it."""
    ratios = compare_rms(scope.history, other, scope.sites, scope.phase)
    measure = Measure("against", f"rms ratio to {other_name} (log₂)", signed=True, scale="linear")
    block = make_block(measure, ratios, scope)
    first = tell_first_difference(ratios, scope.sites, scope.columns.steps)
    return [block] if block is not None else [], {"compared with": other_name, "first difference": first}


def compare_rms(history: History, other: History, sites: Sequence[str], phase: Phase) -> FloatArray:
    """log₂(rms / rms of the other) of each site at each step.

    Returns:
        Shape (sites, steps of ``history``): exactly 0 where both are equal, NaN where either has nothing.
    """
    ours = history.matrix("rms", sites, phase=phase)
    shared = np.array([row for row, site in enumerate(sites) if site in other], dtype=np.int64)
    theirs = other.matrix("rms", [sites[row] for row in shared], phase=phase)
    _, mine, others = np.intersect1d(ours.steps, theirs.steps, assume_unique=True, return_indices=True)
    aligned = np.full(ours.values.shape, np.nan)
    aligned[np.ix_(shared, mine)] = theirs.values[:, others]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.log2(ours.values / aligned)
    ratios[ours.values == aligned] = 0.0
    clipped: FloatArray = np.clip(ratios, -FURTHEST, FURTHEST)
    return clipped


def tell_first_difference(ratios: FloatArray, sites: Sequence[str], steps: IntArray) -> str:
    """The first step at which the two differ, and the first site of it in call order."""
    differs = np.abs(np.nan_to_num(ratios)) > 0
    columns = np.flatnonzero(differs.any(axis=0))
    if len(columns) == 0:
        return "none" if np.isfinite(ratios).any() else "nothing in common"
    return f"step {steps[columns[0]]:,}, {sites[int(np.argmax(differs[:, columns[0]]))]}"
