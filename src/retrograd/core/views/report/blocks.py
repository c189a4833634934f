"""Numbers of a history as blocks of the page: what is drawn, in as many columns as fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from retrograd.core.statistics.row import EXPONENT_BIAS
from retrograd.core.views.downsample import Bands, ColumnBands, IntArray, StepColumns
from retrograd.core.views.page.frame import pack_bytes, pack_floats, pack_json
from retrograd.core.views.report.scope import Scope

Band = Literal["low", "mean", "high"]

ALL_BANDS: tuple[Band, ...] = ("low", "mean", "high")


@dataclass(frozen=True, slots=True)
class Measure:
    """A statistic of the page.

    Attributes:
        name: the history's name for it.
        label: its words on the page.
        bands: what a column of several steps keeps of it.
        signed: whether it is drawn around zero.
        share: whether it lies between 0 and 1.
        scale: the scale on which it is drawn at first.
        is_custom: whether it is the user's own, of which nothing is known.
        about: one sentence for whoever points at it.
    """

    name: str
    label: str
    bands: tuple[Band, ...] = ALL_BANDS
    signed: bool = False
    share: bool = False
    scale: Literal["log", "linear", "ratio"] = "log"
    is_custom: bool = False
    about: str = ""


MEASURES = (
    Measure("rms", "rms", about="Root of the mean square of the finite elements: the typical size of one of them."),
    Measure("mean", "mean", signed=True, about="Mean of the finite elements; near 0 where signs balance."),
    Measure("std", "standard deviation", ("mean", "high"), about="How far elements lie from their mean."),
    Measure("min", "smallest element", ("low",), signed=True, about="The smallest finite element."),
    Measure("max", "largest element", ("high",), signed=True, about="The largest finite element."),
    Measure("zero_share", "share of zeros", share=True, scale="linear", about="Share of elements that are exactly 0."),
    Measure(
        "update_ratio",
        "update ratio",
        about="Norm of the update over that of the weight: how much of the weight one step changes.",
    ),
    Measure("nonfinite", "non-finite elements", ("high",), about="How many elements are NaN or infinite."),
)
"""The largest magnitude is missing because the page has it from ``min`` and ``max``."""


def list_measures(manifest: Mapping[str, Any]) -> list[Measure]:
    """All statistics of the page: ours, then the user's own."""
    return [*MEASURES, *(Measure(str(name), str(name), is_custom=True) for name in manifest.get("statistics") or ())]


@dataclass(frozen=True, slots=True)
class Block:
    """One piece of data of the page.

    Attributes:
        name: how the page asks for it.
        facts: what the page must know to read it (JSON values).
        text: the packed numbers.
    """

    name: str
    facts: dict[str, Any]
    text: str


@dataclass(frozen=True, slots=True)
class Blocks:
    """All data of a page, in parts."""

    statistics: list[Block]
    scalars: Block | None
    exponents: Block | None

    @property
    def listed(self) -> list[Block]:
        """All blocks that are not None."""
        return [*self.statistics, *(block for block in (self.scalars, self.exponents) if block is not None)]


def make_statistic_blocks(scope: Scope) -> list[Block]:
    """A block for each statistic that any of the sites has."""
    custom = scope.history.rows.custom  # a statistic of the user's may be announced, and never come
    measures = [each for each in list_measures(scope.history.manifest) if not each.is_custom or each.name in custom]
    blocks = [pack_bands(measure, bands, scope) for measure, bands in reduce_measures(scope, measures, scope.columns)]
    return [block for block in blocks if block is not None]


def reduce_measures(scope: Scope, measures: Sequence[Measure], columns: StepColumns) -> Iterator[tuple[Measure, Bands]]:
    """What columns keep of each statistic, in one pass over the history."""
    bands = [ColumnBands(len(scope.sites), len(columns.steps), columns.width) for _ in measures]
    for matrices in scope.history.matrices([each.name for each in measures], scope.sites, scope.phase):
        for found, matrix in zip(bands, matrices, strict=True):
            found.add_some(matrix.values, np.searchsorted(columns.steps, matrix.steps))
    return zip(measures, (found.bands for found in bands), strict=True)


def choose_bands(measure: Measure, columns: StepColumns) -> tuple[Band, ...]:
    """The bands that columns keep of a measure; of a single step they are all the same."""
    return measure.bands if columns.width > 1 else ALL_BANDS[:1]


def pack_bands(measure: Measure, reduced: Bands, scope: Scope) -> Block | None:
    """A block of what columns keep of a statistic; None where no series has it."""
    series = np.flatnonzero(~np.isnan(reduced.low).all(axis=1))
    if len(series) == 0:
        return None
    bands = choose_bands(measure, scope.columns)
    numbers = np.stack([getattr(reduced, band)[series] for band in bands])
    is_signed = measure.signed or (measure.is_custom and bool((reduced.low < 0).any()))
    facts = describe_measure(measure, bands, series.tolist(), is_signed=is_signed)
    return Block(f"statistic-{measure.name}", facts, pack_floats(numbers, scope.mantissa_bits))


def describe_measure(measure: Measure, bands: Sequence[Band], series: list[int], *, is_signed: bool) -> dict[str, Any]:
    """What the page must know of a statistic."""
    return {
        "name": measure.name,
        "label": measure.label,
        "about": measure.about or ("A statistic of your own." if measure.is_custom else ""),
        "bands": bands,
        "signed": is_signed,
        "share": measure.share,
        "scale": measure.scale,
        "series": series,
    }


def pack_block(name: str, facts: dict[str, Any], data: bytes) -> Block:
    """A block of plain bytes."""
    return Block(name, facts, pack_bytes(data))


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
    if len(columns) == 0:
        return None
    room = MOST_CELLS // (_TYPICAL_BINS * max(len(scope.sites), 1))
    merged = max(1, -(-len(columns) // max(min(room, _MOST_COLUMNS), 20)))
    wide = StepColumns(columns.steps, columns.width * merged)
    stretches: dict[int, list[int]] = {}
    parts: list[bytes] = []
    offset = 0

    def place(steps: IntArray) -> IntArray:
        """Column 0 and the last one are for steps before and behind those that are shown, of which files hold some."""
        outside = np.where(steps < columns.steps[0], -1, len(wide))
        is_inside = (steps >= columns.steps[0]) & (steps <= columns.steps[-1])
        return 1 + np.where(is_inside, wide.place(steps), outside)

    for number, each in enumerate(scope.history.add_exponents(scope.sites, scope.phase, place, len(wide) + 2)):
        added = each[1:-1]
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


# ---- histograms around zero ----

_MOST_STEPS, _MOST_NUMBERS = 12, 1_500_000
"""Steps of a site that are drawn; counts in a page, beyond which later sites have none."""


def pack_signed(scope: Scope) -> str | None:
    """Rows of step, bound, elements and counts for each series that has any; None where there is none."""
    found = scope.history.signed_histograms()
    series: dict[int, list[tuple[int, float, int, tuple[int, ...]]]] = {}
    room = _MOST_NUMBERS
    for number, site in enumerate(scope.sites):
        ranked = sorted(found.get(site, []), key=lambda fact: -fact.rank)
        of_step = {fact.step: fact for fact in ranked if math.isfinite(fact.value)}
        steps = sorted(of_step)
        places = np.linspace(0, len(steps) - 1, min(len(steps), _MOST_STEPS)).round().astype(int)
        chosen = [steps[place] for place in places]
        facts = [of_step[step] for step in chosen]
        room -= sum(len(fact.counts) for fact in facts)
        if facts and room >= 0:
            series[number] = [(fact.step, fact.value, fact.elements, fact.counts) for fact in facts]
    return pack_json(series) if series else None
