"""Histograms of rows, added up by site and column."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from retrograd.core.history.rows import Part, count_up
from retrograd.core.limits import LIMITS
from retrograd.core.statistics.row import BINS

IntArray = npt.NDArray[np.int64]


class Histograms:
    """Histograms added up by site and column, of the bins that are used."""

    def __init__(self, sites: int, columns: int) -> None:
        self._first = 0
        self._counts = np.zeros((sites, columns, 0), np.int64)

    def add(self, rows: Part, cells: IntArray) -> None:
        """Add the histograms of rows; a cell is a site's place times the columns, plus a column."""
        lengths, first = rows["bin_count"].astype(np.int64), rows["first_bin"].astype(np.int64)
        used = lengths > 0
        if not used.any():
            return
        self._reach(int(first[used].min()), int((first + lengths)[used].max()))
        start = cells * self._counts.shape[2] + first - self._first
        ends = np.cumsum(lengths)
        counts, bins = self._counts.reshape(-1), rows["bins"]
        for low in range(0, len(cells), LIMITS.histograms_at_once):
            some = slice(low, low + LIMITS.histograms_at_once)
            skipped = int(ends[low] - lengths[low])
            place = count_up(start[some], lengths[some])
            np.add.at(counts, place, bins[skipped : skipped + len(place)].astype(np.int64))

    def of_site(self, place: int) -> npt.NDArray[np.int64]:
        """Those of one site: shape ``[columns, 255]``."""
        counts = np.zeros((self._counts.shape[1], BINS), np.int64)
        counts[:, self._first : self._first + self._counts.shape[2]] = self._counts[place]
        return counts

    def list_stretches(
        self, cells: IntArray
    ) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Of some cells the first bin that is used, how many there are to the last one, and their counts."""
        counts = self._counts.reshape(-1, self._counts.shape[2])[cells]
        n = counts.shape[1]
        used = counts > 0
        has_any = used.any(axis=1)
        first = np.where(has_any, used.argmax(axis=1) if n else 0, 0)
        end = np.where(has_any, n - used[:, ::-1].argmax(axis=1) if n else 0, 0)
        within = (np.arange(n) >= first[:, None]) & (np.arange(n) < end[:, None])
        begins = np.where(has_any, first + self._first, 0)
        return begins.astype(np.int16), (end - first).astype(np.int32), counts[within]

    def _reach(self, first: int, end: int) -> None:
        """Make room for bins first … end − 1."""
        sites, columns, n = self._counts.shape
        if not (0 <= first <= end <= BINS):
            raise ValueError(f"bins {first} … {end - 1} are not among 0 … {BINS - 1}")
        if n and self._first <= first and end <= self._first + n:
            return
        low, high = (min(first, self._first), max(end, self._first + n)) if n else (first, end)
        wider = np.zeros((sites, columns, high - low), np.int64)
        wider[:, :, self._first - low : self._first - low + n] = self._counts
        self._first, self._counts = low, wider


def add_exponents(rows: Part, groups: IntArray, n_groups: int) -> npt.NDArray[np.int64]:
    """Histograms of rows that are held, added up over those of a group: shape ``[n_groups, 255]``."""
    added = Histograms(1, n_groups)
    added.add(rows, groups)
    return added.of_site(0)
