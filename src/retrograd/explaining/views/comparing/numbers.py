"""Numbers of several runs as blocks of the page: curves of each, and the ratio of each to the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from retrograd.core.history.matrix import Matrix
from retrograd.core.views.downsample import ColumnBands, FloatArray, IntArray
from retrograd.core.views.page.frame import pack_floats
from retrograd.core.views.report.blocks import (
    ALL_BANDS,
    MEASURES,
    Block,
    choose_bands,
    describe_measure,
    reduce_measures,
)
from retrograd.core.views.report.scalars import reduce_curve
from retrograd.explaining.views.comparing.alignment import Aligned

_CURVES = tuple(each for each in MEASURES if each.name in {"rms", "mean", "zero_share", "update_ratio", "nonfinite"})


def make_blocks(aligned: Aligned, names: Sequence[str]) -> list[Block]:
    """All numbers of the page; those of the map first."""
    curves: list[Block] = []
    broken: list[FloatArray] = []
    for number in range(len(names)):
        found, bad = _make_curves(aligned, number)
        curves += found
        broken.append(bad)
    ratios = [_make_ratio(aligned, number, names) for number in range(1, len(names))]
    marks = [_make_marks(aligned, number, np.fmax(broken[0], broken[number])) for number in range(1, len(names))]
    losses = [_make_loss(aligned, number) for number in range(len(names))]
    return [*ratios, *marks, *(each for each in losses if each is not None), *curves]


def _make_curves(aligned: Aligned, number: int) -> tuple[list[Block], FloatArray]:
    """Curves of one run, and for all sites how many of its elements were not finite: shape (sites, columns)."""
    scope, rows, columns = aligned.scopes[number], aligned.rows[number], aligned.columns
    blocks, bad = [], np.full((len(aligned.names), len(columns)), np.nan)
    for measure, reduced in reduce_measures(scope, _CURVES, columns):
        has = np.flatnonzero(~np.isnan(reduced.low).all(axis=1))
        if measure.name == "nonfinite":
            bad[rows] = reduced.high
            has = has[(reduced.high[has] > 0).any(axis=1)]
        if not len(has):
            continue
        kept = choose_bands(measure, columns)
        facts = describe_measure(measure, kept, rows[has].tolist(), is_signed=measure.signed)
        facts |= {"name": f"{measure.name}-{number}", "unlisted": True}
        numbers = np.stack([getattr(reduced, band)[has] for band in kept])
        blocks.append(_pack(facts, numbers, aligned.mantissa_bits))
    return blocks, bad


def _make_loss(aligned: Aligned, number: int) -> Block | None:
    numbers = reduce_curve(aligned.scopes[number].history.loss, aligned.columns)
    facts = {"bands": ALL_BANDS, "series": [0], "name": f"loss-{number}", "label": "loss", "unlisted": True}
    return None if numbers is None else _pack(facts, numbers, 23)


def _make_marks(aligned: Aligned, number: int, bad: FloatArray) -> Block:
    """Elements that are not finite in the first run or in this one, of the sites that have any."""
    series = np.flatnonzero((bad > 0).any(axis=1))
    facts = {"name": f"bad-{number}", "label": "", "bands": ["high"], "series": series.tolist(), "unlisted": True}
    return _pack(facts, bad[series][None], aligned.mantissa_bits)


def _make_ratio(aligned: Aligned, number: int, names: Sequence[str]) -> Block:
    """The rms of a run over that of the first, as binary logarithm; of every site, also where only one has it."""
    first, other = names[0], names[number]
    facts: dict[str, Any] = {
        "name": f"ratio-{number}",
        "label": f"{other} ÷ {first}",
        "title": f"{other} ÷ {first}: rms",
        "about": "By which factor the typical size of an element differs; = where it does not, to the last bit.",
        "bands": ["high"],
        "signed": True,
        "share": False,
        "scale": "ratio",
        "series": list(range(len(aligned.names))),
        "bad": f"bad-{number}",
        "gone": f"zero in {other} only",
        "come": f"zero in {first} only",
    }
    return _pack(facts, find_ratios(aligned, number)[None], aligned.mantissa_bits)


def find_ratios(aligned: Aligned, number: int) -> FloatArray:
    """log₂(rms of a run / rms of the first), of each column that which is furthest from equal.

    Returns:
        Shape (sites, columns): exactly 0 where both are equal, −∞ where only the other is zero, +∞ where only the first
        is, NaN where not both were recorded.
    """
    columns = aligned.columns
    _, ours, theirs = np.intersect1d(aligned.rows[0], aligned.rows[number], return_indices=True)
    pair = (aligned.scopes[0], ours), (aligned.scopes[number], theirs)
    bands = ColumnBands(len(ours), len(columns.steps), columns.width)
    if len(ours):
        sources = (
            (only for [only] in scope.history.matrices(["rms"], [scope.sites[each] for each in picked], scope.phase))
            for scope, picked in pair
        )
        for steps, one, other in match_steps(*sources):
            bands.add_some(_divide(other, one), np.searchsorted(columns.steps, steps))
    found = np.full((len(aligned.names), len(columns)), np.nan)
    low, high = bands.bands.low, bands.bands.high
    found[aligned.rows[0][ours]] = np.where(np.abs(low) > np.abs(high), low, high)
    return found


def match_steps(a: Iterator[Matrix], b: Iterator[Matrix]) -> Iterator[tuple[IntArray, FloatArray, FloatArray]]:
    """Steps that two runs share with the values of both, from pieces of rising steps of which one a run is held."""
    one, other = next(a, None), next(b, None)
    while one is not None and other is not None:
        steps, i, j = np.intersect1d(one.steps, other.steps, assume_unique=True, return_indices=True)
        if len(steps):
            yield steps, one.values[:, i], other.values[:, j]
        ends = [int(each.steps[-1]) if len(each.steps) else -1 for each in (one, other)]
        if ends[0] <= ends[1]:
            one = next(a, None)
        if ends[1] <= ends[0]:
            other = next(b, None)


def _divide(other: FloatArray, one: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratios: FloatArray = np.log2(other) - np.log2(one)
    ratios[other == one] = 0.0
    ratios[~(np.isfinite(other) & np.isfinite(one))] = np.nan
    return ratios


def _pack(facts: dict[str, Any], numbers: FloatArray, bits: int) -> Block:
    return Block(f"statistic-{facts['name']}", facts, pack_floats(numbers, bits))
