"""Ranks that hold the same tensor at a site, so that readers count it once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrograd.core.history.sink import PHASES
from retrograd.core.history.steps import number_steps
from retrograd.core.notices import warn

IntArray = npt.NDArray[np.int64]
Table = Mapping[str, npt.NDArray[Any]]

_MOMENT = ("site", "step", "micro", "backward", "phase")
_TRAIN = PHASES.index("train")
COMPARED = ("calls", "count", "nan", "zeros", "sum", "m2", "min", "max")


class Disagreement(NamedTuple):
    """Two ranks that should hold equal copies of a tensor and do not.

    Attributes:
        site: name of the site.
        step: first step at which the copies differ.
        shown: the rank whose rows count.
        other: the rank that differs from it.
    """

    site: str
    step: int
    shown: int
    other: int


class Lag(NamedTuple):
    """Steps in which one rank has fewer micro-batches than another.

    Attributes:
        steps: rising.
        fewer: by how many.
    """

    steps: IntArray
    fewer: IntArray


def find_lags(lasts: Mapping[int, tuple[IntArray, IntArray]]) -> dict[int, Lag]:
    """Find the ranks that have fewer micro-batches in a step than another one.

    Args:
        lasts: for each rank its steps, rising, and the last micro-batch of each.
    """
    if not any(last.any() for _, last in lasts.values()):
        return {}
    steps = np.empty(0, np.int64)
    for each, _ in lasts.values():  # one rank after the other: there may be many
        steps = steps if np.array_equal(steps, each) else number_steps(np.concatenate((steps, each)))[0]
    most = np.zeros(len(steps), np.int64)
    for of_rank, last in lasts.values():
        np.maximum.at(most, np.searchsorted(steps, of_rank), last)
    found = {}
    for rank, (of_rank, last) in lasts.items():
        fewer = most[np.searchsorted(steps, of_rank)] - last
        if fewer.any():
            found[rank] = Lag(of_rank[fewer > 0], fewer[fewer > 0])
    return found


class Copies:
    """Groups of ranks that hold copies of one tensor, by site.

    Micro-batches of training are counted from the end of a step: there ranks that had different numbers of them reduce.

    Args:
        groups: for each site, by number, groups of ranks that hold the same. A rank in no group holds its own.
        names: the names of those sites, by number.
        lags: of ranks that have fewer micro-batches in some steps than others.

    Attributes:
        warned: sites for which a warning has said that their copies differ.
    """

    def __init__(
        self,
        groups: Mapping[int, Sequence[Sequence[int]]],
        names: Mapping[int, str],
        lags: Mapping[int, Lag] | None = None,
    ) -> None:
        self._names = names
        self._lags = lags or {}
        self.warned: set[str] = set()
        self._has_copies = np.zeros(max((code for code, found in groups.items() if found), default=-1) + 2, np.bool_)
        self._has_copies[[code for code, found in groups.items() if found]] = True  # the last one: all sites beyond
        self._held: dict[int, dict[int, int]] = {}
        """For each rank the sites that others hold too, and the lowest rank that does."""
        for code, found in groups.items():
            for group in found:
                for rank in group:
                    self._held.setdefault(rank, {})[code] = min(group)
        self._owners_of: dict[int, IntArray] = {}

    def count(self, rows: Table, index: IntArray) -> tuple[npt.NDArray[np.bool_], list[Disagreement]]:
        """Of rows that are all held: those that count, and for each site the first step at which copies differ.

        Args:
            rows: columns, those of :data:`COMPARED` among them.
            index: which rows of these.

        Returns:
            Whether each row at ``index`` counts: of copies made at one moment, those of the lowest rank do.
        """
        counts = np.ones(len(index), np.bool_)
        shared = np.flatnonzero(self._has_copies[np.minimum(rows["site"][index], len(self._has_copies) - 1)])
        picked = {name: rows[name][index[shared]] for name in (*_MOMENT, "rank", *COMPARED)}
        aligned = self.align(picked)
        order, starts = _sort([aligned[name] for name in _MOMENT])
        moments = np.empty(len(order), np.int64)
        moments[order] = np.cumsum(starts) - 1
        watch = CopyWatch(self)
        for rank in np.unique(picked["rank"]).tolist():
            mine = np.flatnonzero(picked["rank"] == rank)
            of_rank = {name: column[mine] for name, column in picked.items()}
            counts[shared[mine]] = watch.count(rank, moments[mine], of_rank)
        watch.settle()
        first = order[starts]
        found: dict[int, Disagreement] = {}
        for moment, (shown, other) in sorted(watch.different.items()):
            site, step = int(aligned["site"][first[moment]]), int(aligned["step"][first[moment]])
            found.setdefault(site, Disagreement(self._names[site], step, shown, other))
        return counts, list(found.values())

    def name(self, code: int) -> str:
        """The name of a site that has copies."""
        return self._names[code]

    def find_owners(self, sites: npt.NDArray[Any], rank: int) -> IntArray:
        """For rows of one rank, the lowest rank that holds the same; −1 for sites that nobody else holds."""
        if rank not in self._owners_of:
            owners = np.full(len(self._has_copies), -1)
            held = self._held.get(rank, {})
            owners[list(held)] = list(held.values())
            self._owners_of = {rank: owners}  # whoever reads rank after rank asks for the same one again
        found: IntArray = self._owners_of[rank][np.minimum(sites, len(self._has_copies) - 1)]
        return found

    def align(self, rows: Table) -> Table:
        """Rows of which the last micro-batches of a step have the same number on all ranks."""
        if not self._lags or not len(rows["step"]):
            return rows
        step, rank = rows["step"], rows["rank"]
        micro, trains = rows["micro"].astype(np.int64), rows["phase"] == _TRAIN
        for each in np.unique(rank).tolist():
            lag = self._lags.get(each)
            if lag is not None:
                place = np.minimum(np.searchsorted(lag.steps, step), len(lag.steps) - 1)
                micro += np.where((rank == each) & trains & (lag.steps[place] == step), lag.fewer[place], 0)
        return {**rows, "micro": micro}

    def tell(self, found: Iterable[Disagreement]) -> None:
        """Warn of copies that differ, once for each site."""
        new = [each for each in found if each.site not in self.warned]
        self.warned.update(each.site for each in new)
        if new:
            site, step, shown, other = new[0]
            more = f" The same holds for {len(new) - 1} more sites." if len(new) > 1 else ""
            text = (
                f"Ranks {shown} and {other} hold copies of {site!r} that differ from step {step} on; rank {shown} is "
                f"shown.{more}"
            )
            warn(text)


class CopyWatch:
    """Separates copies from what counts, rank after rank, among rows of which not all are held at one time.

    It keeps the moments that lower ranks have told of, and a digest of the numbers at each.

    Attributes:
        copies: which ranks hold the same.
    """

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self._rank = -1
        self._new: dict[int, list[_Told]] = {}
        self._told: dict[int, _Told] = {}
        self.different: dict[int, tuple[int, int]] = {}
        """Moments at which copies differ, each with the rank that is shown, and another."""
        self.left_out = 0
        """Rows that were read and are not of the moments that are watched."""

    def count(self, rank: int, moments: IntArray, rows: Table) -> npt.NDArray[np.bool_]:
        """Mark the rows that are no copies of a lower rank's.

        Args:
            rank: that of these rows; no lower one may follow it.
            moments: a number for the site and the moment of each.
            rows: their columns. Where those that are compared are among them, it is noted which differ.
        """
        if rank != self._rank:
            self.settle()
            self._rank = rank
        owners = self.copies.find_owners(rows["site"], rank)
        counts = np.ones(len(moments), np.bool_)
        for owner in np.unique(owners[owners >= 0]).tolist():
            mine = np.flatnonzero(owners == owner)
            ranks = np.full(len(mine), rank, np.int64)
            self._new.setdefault(owner, []).append(_Told(moments[mine], ranks, _digest(rows, mine)))
            if owner in self._told:
                counts[mine] = ~_find(self._told[owner].moments, moments[mine])[1]
        return counts

    def settle(self) -> None:
        """Take in the rows of a rank, of which all were given, and compare them with those of lower ranks."""
        for owner, pieces in self._new.items():
            new = _Told(*map(np.concatenate, zip(*pieces, strict=True))).in_order()
            told = self._told.get(owner)
            self._told[owner] = new if told is None else self._compare(told, new)
        self._new = {}

    def _compare(self, told: _Told, new: _Told) -> _Told:
        place, is_known = _find(told.moments, new.moments)
        differs = np.flatnonzero(is_known & (told.digests[place] != new.digests))
        for at in differs.tolist():
            self.different.setdefault(int(new.moments[at]), (int(told.ranks[place[at]]), self._rank))
        if is_known.all():
            return told
        added = [np.concatenate((old, more[~is_known])) for old, more in zip(told, new, strict=True)]
        order = np.argsort(added[0], kind="stable")
        return _Told(*(column[order] for column in added))


class _Told(NamedTuple):
    """Rows that were given: their moments, of which rank they are, and digests of their numbers."""

    moments: IntArray
    ranks: IntArray
    digests: npt.NDArray[np.uint64]

    def in_order(self) -> _Told:
        """By rising moment, each once; digests of several rows of a moment are added up."""
        if (np.diff(self.moments) > 0).all():
            return self
        moments, first, groups = np.unique(self.moments, return_index=True, return_inverse=True)
        digests = np.zeros(len(moments), np.uint64)
        np.add.at(digests, groups, self.digests)
        return _Told(moments, self.ranks[first], digests)


_MIX = np.uint64(0x9E3779B97F4A7C15)


def _digest(rows: Table, index: IntArray) -> npt.NDArray[np.uint64]:
    """A number for what is compared of each row: the same for equal ones, and for others all but surely not."""
    mixed = np.ones(len(index), np.uint64)
    for name in COMPARED if all(name in rows for name in COMPARED) else ():
        column = rows[name][index]
        bits = (column + 0.0).view(np.uint64) if column.dtype.kind == "f" else column.astype(np.uint64)
        mixed = (mixed ^ bits) * _MIX
        mixed ^= mixed >> np.uint64(29)
    return mixed


def _find(ordered: IntArray, wanted: IntArray) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Where each number is among rising ones, and whether it is there."""
    begin = int(np.searchsorted(ordered, wanted[0])) if len(wanted) else 0
    if np.array_equal(ordered[begin : begin + len(wanted)], wanted):  # ranks mostly write the same, in the same order
        return np.arange(begin, begin + len(wanted)), np.ones(len(wanted), np.bool_)
    place = np.minimum(np.searchsorted(ordered, wanted), max(len(ordered) - 1, 0))
    return place, ordered[place] == wanted if len(ordered) else np.zeros(len(wanted), np.bool_)


def _sort(keys: Sequence[npt.NDArray[Any]]) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """The order of rows by some keys, the first of them first; and which of them, in it, differ from the one before."""
    order = np.lexsort(tuple(reversed(keys)))
    starts = np.ones(len(order), np.bool_)
    starts[1:] = np.any([key[order][1:] != key[order][:-1] for key in keys], axis=0)
    return order, starts


def join_groups(groups: Iterable[Iterable[int]]) -> list[tuple[int, ...]]:
    """Join groups that share a member, and drop groups of a single member."""
    joined: list[set[int]] = []
    for group in groups:
        new = set(group)
        for other in [each for each in joined if each & new]:
            joined.remove(other)
            new |= other
        joined.append(new)
    return [tuple(sorted(each)) for each in joined if len(each) > 1]
