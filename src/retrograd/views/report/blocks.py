"""Statistics of a history as blocks of the page: what is drawn, in as many columns as fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.errors import StatisticError
from retrograd.history.history import History
from retrograd.history.sink import Phase
from retrograd.views.downsample import Columns, FloatArray, reduce_columns
from retrograd.views.report.measures import ALL_BANDS, MEASURES, Measure, list_measures
from retrograd.views.report.packing import pack_bytes, pack_floats


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


def make_statistic_blocks(
    history: History, sites: Sequence[str], columns: Columns, phase: Phase, mantissa_bits: int
) -> Iterator[Block]:
    """A block for each statistic that any of the sites has."""
    for measure in list_measures(history.manifest):
        try:
            values = history.matrix(measure.name, sites, phase=phase).values
        except StatisticError:  # a statistic of the user's that was announced and never came
            continue
        block = _make_block(measure, values, columns, mantissa_bits)
        if block is not None:
            yield block


def _make_block(measure: Measure, values: FloatArray, columns: Columns, mantissa_bits: int) -> Block | None:
    """Numbers of shape (bands, series, columns), for the series that have the statistic at all."""
    series = np.flatnonzero(~np.isnan(values).all(axis=1))
    if len(series) == 0:
        return None
    reduced = reduce_columns(values[series], columns.width)
    bands = measure.bands if columns.width > 1 else ALL_BANDS[:1]
    numbers = np.stack([getattr(reduced, band) for band in bands])
    facts = {
        "name": measure.name,
        "label": measure.label,
        "bands": bands,
        "signed": measure.signed or (measure not in MEASURES and bool((values < 0).any())),
        "share": measure.share,
        "series": series.tolist(),
    }
    return Block(f"statistic-{measure.name}", facts, pack_floats(numbers, mantissa_bits))


def make_loss_block(steps: npt.NDArray[np.int64], values: FloatArray, columns: Columns) -> Block | None:
    """The loss of each column; several losses of one step, or of steps that were not recorded, share a column."""
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
