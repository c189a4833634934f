"""Histograms of exponents over steps, small enough for the page.

A cell tells which share of a site's finite, non-zero elements had that exponent in those steps. Shares are
written as one byte, in half powers of two from 2⁻²⁴ to 1, so that a single element in many stays visible.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from retrograd.statistics.row import EXPONENT_BIAS
from retrograd.views.downsample import Columns
from retrograd.views.report.blocks import Block, pack_block
from retrograd.views.report.scope import Scope

LEVELS_PER_OCTAVE = 2
SMALLEST_SHARE = -24
"""log2 of the smallest share that has a code of its own."""

MOST_CELLS = 3_000_000
"""Cells of all histograms together; more are drawn in fewer columns."""

_TYPICAL_BINS = 30
_MOST_COLUMNS = 250


def make_exponent_block(scope: Scope) -> Block | None:
    """Histograms of all sites that have one, each cut to the bins it uses; ``None`` where there is none."""
    columns = scope.columns
    room = MOST_CELLS // (_TYPICAL_BINS * max(len(scope.sites), 1))
    merged = max(1, -(-len(columns) // max(min(room, _MOST_COLUMNS), 20)))
    wide = Columns(columns.steps, columns.width * merged)
    stretches: dict[int, list[int]] = {}
    parts: list[bytes] = []
    offset = 0
    for number, site in enumerate(scope.sites):
        steps, counts = scope.history[site].select(phase=scope.phase).exponents
        added = add_columns(counts, wide.place(steps), len(wide))
        used = np.flatnonzero(added.any(axis=0))
        if len(used) == 0:
            continue
        first, last = int(used[0]), int(used[-1]) + 1
        part = encode_shares(added[:, first:last])
        stretches[number] = [offset, first - EXPONENT_BIAS, last - first]
        parts.append(part.tobytes())
        offset += part.size
    if not parts:
        return None
    facts = {
        "columns": len(wide),
        "merged": merged,
        "stretches": stretches,
        "levels": LEVELS_PER_OCTAVE,
        "smallest": SMALLEST_SHARE,
    }
    return pack_block("exponents", facts, b"".join(parts))


def add_columns(counts: npt.NDArray[np.int64], place: npt.NDArray[np.int64], columns: int) -> npt.NDArray[np.int64]:
    """Add up histograms that share a column.

    Args:
        counts: shape (n, bins): a histogram a step.
        place: the column of each step, ascending, shape (n,).
        columns: how many columns there are.

    Returns:
        Counts of shape (columns, bins).
    """
    added = np.zeros((columns, counts.shape[1]), dtype=np.int64)
    if len(place):
        starts = np.flatnonzero(np.diff(place, prepend=-1))
        added[place[starts]] = np.add.reduceat(counts, starts, axis=0)
    return added


def encode_shares(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Write shares of histograms as codes.

    Args:
        counts: shape (columns, bins).

    Returns:
        Codes of shape (bins, columns): 0 where no element was, else 1 + ``LEVELS_PER_OCTAVE`` times
        (log2(share) − ``SMALLEST_SHARE``), rounded.
    """
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    levels = LEVELS_PER_OCTAVE * (np.log2(np.maximum(shares, 2.0**SMALLEST_SHARE)) - SMALLEST_SHARE)
    return np.ascontiguousarray(np.where(counts > 0, 1 + np.rint(levels), 0).astype(np.uint8).T)
