"""A table with a cell for each site and step: which rows belong to a cell, and what they come to when merged."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from retrograd.core.history.rows import CALLS_OF, FIXED_TYPES, ROW_TYPES, Columns, Part, Picked, Rows
from retrograd.core.statistics.row import EMPTY_ROW, merge_into, merge_rows

IntArray = npt.NDArray[np.int64]

MOMENT = ("step", "micro", "backward", "phase", "site")
"""Columns that tell the cell of a row."""


class Placing(Protocol):
    """A table of some steps that knows the cells of rows."""

    @property
    def steps(self) -> IntArray:
        """Rising."""

    @property
    def codes(self) -> IntArray:
        """Of the sites, rising."""

    def place(self, piece: Part) -> tuple[npt.NDArray[np.bool_], IntArray]:
        """Which rows belong to the table, and the cells of these."""

    def number(self, piece: Part, cells: IntArray) -> IntArray:
        """A number for the site and the moment of each row, of which these are the cells."""


class Cells(NamedTuple):
    """A part of a table of steps × sites; a cell's number is its step's place times the sites, plus its site's place.

    Attributes:
        steps: rising.
        codes: of the sites, rising.
        phase: code of the only phase; None for all.
    """

    steps: IntArray
    codes: IntArray
    phase: int | None

    def place(self, piece: Part) -> tuple[npt.NDArray[np.bool_], IntArray]:
        """Which rows belong to the table, and the cells of these."""
        line_of = np.full(int(self.codes[-1]) + 2, -1)
        line_of[self.codes] = np.arange(len(self.codes))  # the last one stands for all sites beyond
        line = line_of[np.minimum(piece["site"], len(line_of) - 1)]
        mask = line >= 0
        if self.phase is not None:
            mask &= piece["phase"] == self.phase
        index = np.flatnonzero(mask)  # most often of a few sites among many
        steps = piece["step"][index]
        step = locate(self.steps, steps)
        is_there = self.steps[step] == steps
        cells = step * len(self.codes) + line[index]
        if is_there.all():
            return mask, cells
        mask[index[~is_there]] = False
        return mask, cells[is_there]

    def number(self, piece: Part, cells: IntArray) -> IntArray:
        """A number for the site and the moment of each row, of which these are the cells."""
        return number_moments(piece, cells)


def locate(ordered: IntArray, wanted: npt.NDArray[Any]) -> IntArray:
    """Where each number is among rising ones, if it is there; numbers without gaps need no search."""
    if ordered[-1] - ordered[0] + 1 == len(ordered):
        return np.asarray(np.clip(wanted - ordered[0], 0, len(ordered) - 1), np.int64)
    return np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)


_CELL_BITS = 43  # 3 for the phase, 16 for the backward pass, 24 for the micro-batch


def number_moments(piece: Part, cells: IntArray) -> IntArray:
    """A number for the cell, phase, backward pass and micro-batch of each row."""
    phase, backward = piece["phase"].astype(np.int64), piece["backward"].astype(np.int64) + 1
    micro = np.minimum(piece["micro"].astype(np.int64), (1 << 24) - 1)
    return np.asarray(cells << _CELL_BITS | phase << 40 | backward << 24 | micro, np.int64)


def cell_of(moment: int) -> int:
    """The cell of a moment's number."""
    return moment >> _CELL_BITS


def split_moments(numbers: IntArray) -> Columns:
    """Columns of what else numbers of moments tell: phase, backward pass and micro-batch."""
    return {
        "phase": (numbers >> 40 & 0b111).astype(np.uint8),
        "backward": ((numbers >> 24 & 0xFFFF) - 1).astype(np.int16),
        "micro": (numbers & ((1 << 24) - 1)).astype(np.int32),
    }


class MergedTable:
    """Merged rows, one a cell.

    Args:
        rows: of which record.
        size: how many cells.
        names: the columns; all when left out.
    """

    def __init__(self, rows: Rows, size: int, names: Collection[str] | None = None) -> None:
        wanted = (*ROW_TYPES, *rows.custom) if names is None else names
        self._merges = {name: rows.merges.get(name, "mean") for name in rows.custom if name in wanted}
        self._columns: Columns = {name: np.zeros(size, kind) for name, kind in ROW_TYPES.items() if name in wanted}
        for name in EMPTY_ROW.keys() & self._columns:
            self._columns[name][:] = EMPTY_ROW[name]
        self._custom: Columns = {name: np.full(size, np.nan) for name in self._merges}
        self._weights: Columns = {name: np.zeros(size) for name in self._merges}
        self._is_filled = np.zeros(size, np.bool_)

    def add(self, piece: Part, cells: IntArray) -> None:
        """Merge rows into their cells."""
        low, high = int(cells.min()), int(cells.max()) + 1
        where: slice | IntArray
        if high - low <= 4 * len(cells):
            where, groups, size = slice(low, high), cells - low, high - low
        else:
            where, groups = np.unique(cells, return_inverse=True)
            size = len(where)
        if int(np.bincount(groups).max()) == 1:
            is_dense = size == len(cells) and bool((np.diff(cells) > 0).all())
            at = where if is_dense else cells
            if self._is_filled[at].any():
                merge_into(self._columns, at, piece)
            else:  # of one rank and micro-batch there is nothing to merge
                for name, column in self._columns.items():
                    column[at] = piece[name]
        else:
            merged = merge_rows({name: piece[name] for name in self._columns}, groups, size)
            has_rows = np.bincount(groups, minlength=size) > 0
            at = np.arange(low, high) if isinstance(where, slice) else where
            merge_into(self._columns, at[has_rows], {name: column[has_rows] for name, column in merged.items()})
        if self._merges:
            earlier = np.flatnonzero(self._is_filled[where])
            for name, how in self._merges.items():
                self._add_custom(name, how, piece, where, earlier, np.concatenate((earlier, groups)), size)
        self._is_filled[cells] = True

    def _add_custom(
        self, name: str, how: str, piece: Part, where: slice | IntArray, earlier: IntArray, groups: IntArray, size: int
    ) -> None:
        """Merge a user's statistic; its weights are the calls of rows that have it."""
        values = _join(self._custom[name][where][earlier], piece[name]) if len(earlier) else piece[name]
        calls = np.where(np.isnan(piece[name]), 0.0, piece["calls"])
        if CALLS_OF + name in piece:
            told = piece[CALLS_OF + name]
            calls = np.where(np.isnan(told), calls, told)
        weights = _join(self._weights[name][where][earlier], calls) if len(earlier) else calls
        self._custom[name][where] = merge_custom(values, how, weights, groups, size)
        self._weights[name][where] = np.bincount(groups, weights, minlength=size)

    def take(self) -> tuple[IntArray, Columns]:
        """The cells that were filled, and their columns."""
        filled = np.flatnonzero(self._is_filled)
        found = {**self._columns, **self._custom}
        for name, how in self._merges.items() if "calls" in self._columns else ():
            if how == "mean" and (self._weights[name] != self._columns["calls"]).any():
                found[CALLS_OF + name] = self._weights[name]
        is_full = len(filled) == len(self._is_filled)
        return filled, found if is_full else {name: each[filled] for name, each in found.items()}

    def lay_out(self, cells: Cells) -> Columns:
        """All cells that were filled, as rows of one rank and micro-batch."""
        filled, columns = self.take()
        same = {"micro": 0, "backward": -1, "phase": cells.phase or 0, "rank": 0, "scale": 1.0, "first_bin": 0}
        for name, value in {**same, "bin_count": 0}.items():
            columns[name] = np.broadcast_to(np.array(value, FIXED_TYPES[name]), len(filled))
        columns["step"] = cells.steps[filled // len(cells.codes)]
        columns["site"] = cells.codes[filled % len(cells.codes)].astype(np.int32)
        columns["bins"] = np.empty(0, np.int64)
        return columns


def _join(earlier: npt.NDArray[Any], later: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.concatenate((earlier, later))


def merge_custom(
    values: npt.NDArray[np.float64], how: str, calls: npt.NDArray[Any], groups: npt.NDArray[np.int64], n_groups: int
) -> npt.NDArray[np.float64]:
    """Merge a user's statistic. Rows without a value (NaN) add nothing; a group without any value is NaN."""
    given = ~np.isnan(values)
    values, groups, calls = values[given], groups[given], calls[given]
    has_any = np.bincount(groups, minlength=n_groups) > 0
    if how in ("min", "max"):
        best = np.full(n_groups, np.inf if how == "min" else -np.inf)
        (np.minimum if how == "min" else np.maximum).at(best, groups, values)
        return np.where(has_any, best, np.nan)
    if how == "sum":
        return np.where(has_any, np.bincount(groups, values, minlength=n_groups), np.nan)
    weights = np.bincount(groups, calls, minlength=n_groups)
    with np.errstate(over="ignore"):  # of what a user's function returned
        weighted = np.bincount(groups, values * calls, minlength=n_groups)
    mean: npt.NDArray[np.float64] = np.divide(weighted, weights, out=np.full(n_groups, np.nan), where=weights > 0)
    return mean


def merge_picked(picked: Picked, groups: IntArray, n_groups: int, names: Collection[str] | None = None) -> Columns:
    """Merge rows that are held: all columns of numbers, or some.

    Args:
        picked: the rows.
        groups: for each the number of its group, 0 … ``n_groups − 1``; none is empty.
        n_groups: how many groups there are.
        names: of the columns, with those that they are merged with.
    """
    table = MergedTable(picked.rows, n_groups, names)
    if n_groups:
        table.add(picked, groups)
    return table.take()[1]
