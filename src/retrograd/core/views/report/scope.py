"""The part of a history that a page shows: its phase and sites, columns and digits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from retrograd.core.history.history import History
from retrograd.core.history.rows import encode_phase
from retrograd.core.history.sink import Phase
from retrograd.core.history.steps import JoinedSteps
from retrograd.core.views.downsample import IntArray, StepColumns, share_columns
from retrograd.core.views.page.frame import MANTISSA_BITS
from retrograd.core.views.shown import find_phase

SHARE_OF_NUMBERS = 0.85  # of the file; the rest is code, facts and histograms


@dataclass(frozen=True, slots=True)
class Scope:
    """The part of a history that is shown.

    Attributes:
        history: of what.
        phase: which kind of forward.
        sites: those of which there is anything in this phase, in call order.
        unseen: those of which there is nothing.
        elements: for each of ``sites`` how many elements it had at a step, at most.
        columns: how steps share columns.
        mantissa_bits: to how many bits numbers are rounded.
    """

    history: History
    phase: Phase
    sites: list[str]
    unseen: list[str]
    elements: list[int]
    columns: StepColumns
    mantissa_bits: int


def choose_scope(history: History, phase: Phase | None, most_columns: int, megabytes: float) -> Scope:
    """The finest scope with which the page is expected to stay as small as asked."""
    phase = find_phase(history) if phase is None else phase
    sites, most = history.sites, np.full(len(history.sites), -1.0)
    found = JoinedSteps(history.outline.steps.get(encode_phase(phase), np.empty(0, np.int64)))
    for [counts] in history.matrices(["count"], sites, phase):
        found.add(counts.steps)
        most = np.fmax(most, np.fmax.reduce(counts.values, axis=1, initial=-1))
    elements = most.astype(int).tolist()
    seen = [(site, n) for site, n in zip(sites, elements, strict=True) if n >= 0]
    max_bytes = megabytes * 1e6 * SHARE_OF_NUMBERS
    steps = found.join() if history.sites else find_scalar_steps(history)  # of plain tensors there are these alone
    columns, mantissa_bits = choose_detail(len(seen), len(steps), most_columns, max_bytes)
    return Scope(
        history=history,
        phase=phase,
        sites=[site for site, _ in seen],
        unseen=[site for site, n in zip(sites, elements, strict=True) if n < 0],
        elements=[n for _, n in seen],
        columns=share_columns(steps, columns),
        mantissa_bits=mantissa_bits,
    )


def find_scalar_steps(history: History) -> IntArray:
    """Steps that have any scalar, rising."""
    return np.unique(np.concatenate([np.empty(0, np.int64), *(each.steps for each in history.scalars.values())]))


FEWEST_COLUMNS = 100
MANTISSAS = (MANTISSA_BITS, 13, 9)
"""Bits to round to, finest first; the last leave three significant digits."""

# Numbers a site has in a column, of which there are more where a column keeps several bands. Shares of zeros, update
# ratios and counts are not among them: they are alike for most sites and cost next to nothing.
_SINGLE_NUMBERS = 5
_BAND_NUMBERS = 10

_BYTES_BESIDE_MANTISSA = 0.35  # sign and exponent after compression, measured on noisy curves
_BASE64 = 4 / 3


def choose_detail(n_sites: int, n_steps: int, most_columns: int, max_bytes: float) -> tuple[int, int]:
    """Choose columns, and bits of mantissa, that are expected to take at most ``max_bytes`` as packed text.

    Digits are given up before columns.
    """
    columns = max(min(most_columns, n_steps), 1)
    numbers = n_sites * (_SINGLE_NUMBERS if n_steps <= most_columns else _BAND_NUMBERS)
    for bits in MANTISSAS:
        column_bytes = numbers * (bits / 8 + _BYTES_BESIDE_MANTISSA) * _BASE64
        if columns * column_bytes <= max_bytes:
            return columns, bits
    return min(columns, max(FEWEST_COLUMNS, int(max_bytes / column_bytes))), MANTISSAS[-1]
