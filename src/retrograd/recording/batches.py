"""Batches of rows, cut into smaller ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.history.sink import Moment, RowBatch
from retrograd.statistics.row import ROW


def take_rows(batch: RowBatch, chosen: npt.NDArray[np.bool_], moment: Moment) -> RowBatch:
    """A batch of some of the rows of another one."""
    if chosen.all():
        return replace(batch, moment=moment)
    table = np.frombuffer(batch.rows, ROW)
    bins = np.frombuffer(batch.bins, np.int64)[np.repeat(chosen, table["bins"])]
    return pick_custom(replace(batch, moment=moment, rows=table[chosen].tobytes(), bins=bins.tobytes()))


def rename_rows(batch: RowBatch, numbers: Mapping[int, int]) -> RowBatch:
    """A batch whose rows have other numbers; those that are not named keep theirs."""
    table = np.frombuffer(batch.rows, ROW).copy()
    table["row"] = [numbers.get(row, row) for row in table["row"].tolist()]
    custom: dict[str, Any] = {}
    for name, (rows, values) in batch.custom.items():
        custom[name] = ([numbers.get(row, row) for row in rows], values)
    return replace(batch, rows=table.tobytes(), custom=custom)


def pick_custom(batch: RowBatch) -> RowBatch:
    """A batch whose users' statistics are only those of its own rows."""
    rows = set(np.frombuffer(batch.rows, ROW)["row"].tolist())
    custom: dict[str, Any] = {}
    for name, (numbers, values) in batch.custom.items():
        pairs = [(number, value) for number, value in zip(numbers, values, strict=True) if number in rows]
        custom[name] = ([number for number, _ in pairs], [value for _, value in pairs])
    return replace(batch, custom=custom)
