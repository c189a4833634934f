"""What of a history a page shows: which phase and sites, in how many columns, with how many digits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from retrograd.history.history import History
from retrograd.history.sink import Phase
from retrograd.views.downsample import Columns, share_columns
from retrograd.views.history_of import find_phase
from retrograd.views.report.detail import choose_detail

_SHARE_OF_NUMBERS = 0.85  # of the file; the rest is code, facts and histograms


@dataclass(frozen=True, slots=True)
class Scope:
    """What is shown.

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
    columns: Columns
    mantissa_bits: int


def choose_scope(history: History, phase: Phase | None, most_columns: int, megabytes: float) -> Scope:
    """The finest scope with which the page is expected to stay as small as asked."""
    phase = find_phase(history) if phase is None else phase
    counts = history.matrix("count", phase=phase)
    elements = np.fmax.reduce(counts.values, axis=1, initial=-1).astype(int).tolist()
    seen = [(site, n) for site, n in zip(counts.sites, elements, strict=True) if n >= 0]
    max_bytes = megabytes * 1e6 * _SHARE_OF_NUMBERS
    columns, mantissa_bits = choose_detail(len(seen), len(counts.steps), most_columns, max_bytes)
    return Scope(
        history=history,
        phase=phase,
        sites=[site for site, _ in seen],
        unseen=[site for site, n in zip(counts.sites, elements, strict=True) if n < 0],
        elements=[n for _, n in seen],
        columns=share_columns(counts.steps, columns),
        mantissa_bits=mantissa_bits,
    )
