"""All rows of a record at one time, as columns that are loaded when first asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.history.columns import FIXED_TYPES, ROW_TYPES, concatenate_columns
from retrograd.history.copies import Copies
from retrograd.statistics.row import BINS, merge_rows

Part = Mapping[str, npt.NDArray[Any]]
"""Columns of some of the rows, in memory or still in a file."""

Index = npt.NDArray[np.int64] | slice


class Rows(Mapping[str, npt.NDArray[Any]]):
    """Columns over several parts. It never changes: what is added makes a new one.

    Args:
        parts: where the columns come from.
        earlier: rows as they were before; what was loaded of them is used again where the parts are the same.
        merges: how a user's statistic merges, by its name: ``mean`` over tensors (where it is not named), ``sum``,
            ``min`` or ``max``.
        copies: which ranks hold the same; None where none do, or that is not known.
    """

    def __init__(
        self,
        parts: Sequence[Part] = (),
        earlier: Rows | None = None,
        merges: Mapping[str, str] | None = None,
        copies: Copies | None = None,
    ) -> None:
        self.parts = tuple(parts)
        self.copies = copies
        self.merges = merges or {}
        self._loaded: dict[str, npt.NDArray[Any]] = {}
        self._carried: dict[str, tuple[int, npt.NDArray[Any]]] = {}
        if earlier is not None and all(old is new for old, new in zip(earlier.parts, self.parts, strict=False)):
            loaded = {name: (len(earlier.parts), column) for name, column in earlier._loaded.items()}
            self._carried = {**earlier._carried, **loaded}

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name not in self:
            raise KeyError(name)
        column = self._loaded.get(name)
        if column is None:
            column = self._loaded[name] = self._load(name)
        return column

    def __contains__(self, name: object) -> bool:
        return name in FIXED_TYPES or name in self.custom

    def __iter__(self) -> Iterator[str]:
        yield from FIXED_TYPES
        yield from self.custom

    def __len__(self) -> int:
        return len(FIXED_TYPES) + len(self.custom)

    @property
    def count(self) -> int:
        """How many rows there are."""
        return len(self["step"])

    @cached_property
    def custom(self) -> list[str]:
        """Names of users' statistics."""
        return list(dict.fromkeys(name for part in self.parts for name in part if name not in FIXED_TYPES))

    @cached_property
    def bin_starts(self) -> npt.NDArray[np.int64]:
        """Where each row's stretch begins in ``bins``."""
        lengths = self["bin_count"].astype(np.int64)
        return np.cumsum(lengths) - lengths

    def of_site(self, code: int) -> npt.NDArray[np.int64]:
        """Which rows are of one site, in order."""
        order, ends = self._by_site
        return order[ends[code] : ends[code + 1]] if code + 1 < len(ends) else order[:0]

    def counts(self, index: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of these rows are no copies of others among them; says where copies differ."""
        if self.copies is None:
            return np.ones(len(index), np.bool_)
        self.copies.warn(self, index)
        return self.copies.counts(self, index)

    @cached_property
    def _by_site(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        site = self["site"]
        counts = np.bincount(site) if len(site) else np.zeros(0, np.int64)
        small = site.astype(np.uint16) if len(counts) <= 1 << 16 else site  # sorted by radix, ten times as fast
        return np.argsort(small, kind="stable"), np.concatenate(([0], np.cumsum(counts)))

    def _load(self, name: str) -> npt.NDArray[Any]:
        covered, column = self._carried.pop(name, (0, None))
        if column is None:
            return concatenate_columns(self.parts, name)
        return np.concatenate((column, concatenate_columns(self.parts[covered:], name)))


class Picked(Mapping[str, npt.NDArray[Any]]):
    """Some of the rows; a column is taken only when it is asked for."""

    def __init__(self, rows: Rows, index: Index) -> None:
        self.rows = rows
        self.index = index

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self.rows[name][self.index]

    def __contains__(self, name: object) -> bool:
        return name != "bins" and name in self.rows

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.rows if name != "bins")

    def __len__(self) -> int:
        return len(self.rows) - 1

    def merge(self, groups: npt.NDArray[np.int64], n_groups: int) -> Part:
        """Merge rows of the same group."""
        rows = {name: self[name] for name in ROW_TYPES}
        merged = merge_rows(rows, groups, n_groups)
        for name in self.rows.custom:
            how = self.rows.merges.get(name, "mean")
            merged[name] = _merge_custom(self[name], how, rows["calls"], groups, n_groups)
        return merged

    def exponents(self, groups: npt.NDArray[np.int64], n_groups: int) -> npt.NDArray[np.int64]:
        """Exponent histograms, added up over the rows of a group: shape ``[n_groups, 255]``."""
        lengths = self["bin_count"].astype(np.int64)
        owner = np.repeat(np.arange(len(lengths)), lengths)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        starts = self.rows.bin_starts[self.index]
        counts = np.zeros((n_groups, BINS), np.int64)
        place = groups[owner] * BINS + self["first_bin"].astype(np.int64)[owner] + within
        np.add.at(counts.reshape(-1), place, self.rows["bins"][starts[owner] + within])
        return counts


def _merge_custom(
    values: npt.NDArray[np.float64], how: str, calls: npt.NDArray[Any], groups: npt.NDArray[np.int64], n_groups: int
) -> npt.NDArray[np.float64]:
    """Merge a user's statistic. A row that has none of it is NaN and adds nothing; a group without any is NaN."""
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
    weighted = np.bincount(groups, values * calls, minlength=n_groups)
    mean: npt.NDArray[np.float64] = np.divide(weighted, weights, out=np.full(n_groups, np.nan), where=weights > 0)
    return mean


def join_neighbours(parts: Sequence[Part]) -> list[Part]:
    """Join the last parts while they are of like size, so that there are few of them and each row moves seldom."""
    joined = list(parts)
    while len(joined) > 1 and len(joined[-2]["step"]) <= 2 * len(joined[-1]["step"]):
        last_two = joined[-2:]
        names = dict.fromkeys(name for part in last_two for name in part)
        joined[-2:] = [{name: concatenate_columns(last_two, name) for name in names}]
    return joined
