"""Statistics of a history as blocks of the page: what is drawn, in as many columns as fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrograd.errors import StatisticError
from retrograd.views.downsample import FloatArray, reduce_columns
from retrograd.views.page.embedding import pack_bytes
from retrograd.views.report.measures import ALL_BANDS, Measure, list_measures
from retrograd.views.report.packing import pack_floats
from retrograd.views.report.scope import Scope


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
    loss: Block | None
    exponents: Block | None

    @property
    def listed(self) -> list[Block]:
        """Those that there are."""
        return [*self.statistics, *(block for block in (self.loss, self.exponents) if block is not None)]


def make_statistic_blocks(scope: Scope) -> Iterator[Block]:
    """A block for each statistic that any of the sites has."""
    for measure in list_measures(scope.history.manifest):
        try:
            values = scope.history.matrix(measure.name, scope.sites, phase=scope.phase).values
        except StatisticError:  # a statistic of the user's that was announced and never came
            continue
        block = make_block(measure, values, scope)
        if block is not None:
            yield block


def make_block(measure: Measure, values: FloatArray, scope: Scope) -> Block | None:
    """Numbers of shape (bands, series, columns), for the series that have the statistic at all.

    Args:
        measure: what they are.
        values: shape (sites, steps) of the scope.
        scope: what is shown.
    """
    series = np.flatnonzero(~np.isnan(values).all(axis=1))
    if len(series) == 0:
        return None
    reduced = reduce_columns(values[series], scope.columns.width)
    bands = measure.bands if scope.columns.width > 1 else ALL_BANDS[:1]
    numbers = np.stack([getattr(reduced, band) for band in bands])
    facts = {
        "name": measure.name,
        "label": measure.label,
        "bands": bands,
        "signed": measure.signed or (measure.is_custom and bool((values < 0).any())),
        "share": measure.share,
        "scale": measure.scale,
        "series": series.tolist(),
    }
    return Block(f"statistic-{measure.name}", facts, pack_floats(numbers, scope.mantissa_bits))


def make_loss_block(scope: Scope) -> Block | None:
    """The loss of each column; several losses of one step, or of steps that were not recorded, share a column."""
    steps, values = scope.history.loss
    columns = scope.columns
    if len(values) == 0 or len(columns) == 0:
        return None
    place = columns.place(steps)
    low, high = np.full(len(columns), np.nan), np.full(len(columns), np.nan)
    np.fmin.at(low, place, values)
    np.fmax.at(high, place, values)
    known = np.isfinite(values)
    total = np.bincount(place[known], values[known], len(columns))
    count = np.bincount(place[known], minlength=len(columns))
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return Block("loss", {"bands": ALL_BANDS, "series": [0]}, pack_floats(np.stack([low, mean, high])))


def pack_block(name: str, facts: dict[str, Any], data: bytes) -> Block:
    """A block of plain bytes."""
    return Block(name, facts, pack_bytes(data))
