"""Rows of many ranks, merged as a reader merges them: copies count once, all else adds up.

Rows wait by moment until all ranks below have passed it. Who comes later than that adds further rows of the same
moment, which readers add up; a copy that comes late is left out if one of its kind has gone. So what is recorded does
not depend on who was first.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrograd.core.history.cells import merge_custom
from retrograd.core.history.copies import Disagreement
from retrograd.core.history.sink import Phase, RowBatch
from retrograd.core.merging.sites import OWN, IntArray, SharedSites
from retrograd.core.statistics.row import BINS, ROW, merge_rows

_COMPARED = ("calls", "count", "nan", "zeros", "sum", "m2", "min", "max")
_REMEMBERED = 32
"""Steps that have gone of which late copies are still told apart."""
_MARKED = 128
"""Steps and turns of which it is known whose copies have counted elsewhere: as many as a ledger tells of."""
_GROUPS_AT_ONCE = 4096
"""Histograms that are spread out in memory at a time, 2 KB each."""

When = tuple[int, int]
"""Step and turn of a unit."""

MomentKey = tuple[int, int, int, str, float]
"""Step, micro-batch, pass, phase and loss scale: what rows must have in common to be merged."""


@dataclass(frozen=True, slots=True)
class RankedRows:
    """Rows with what is known of the ranks that they are from.

    Attributes:
        batch: the rows, ``row`` being the code of a site; users' statistics are of places among them. Of copies the
            micro-batch is counted from the end of the step, see :func:`count_from_end`.
        owners: int32 for each row: the lowest rank that holds the same; ``OWN`` for what adds up.
        sources: int32 for each row: the rank that it is from; of merged ones, any.
    """

    batch: RowBatch
    owners: bytes
    sources: bytes

    @property
    def key(self) -> MomentKey:
        moment = self.batch.moment
        return moment.step, moment.micro, moment.backward, moment.phase, self.batch.scale

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.batch.rows) + len(self.batch.bins) + len(self.owners) + len(self.sources)


class GoneCopies(NamedTuple):
    """Copies that have been handed on: their keys, rising, and the rank whose rows counted."""

    keys: IntArray
    sources: IntArray


class RowMerger:
    """Holds rows until they are complete.

    Args:
        sites: their names, and who holds copies.
        span: the ranks whose rows come here. What all holders of are among them is a copy no more once it is merged.
        how: how users' statistics merge, by name.

    Attributes:
        is_top: rows go no further: copies are a part of what adds up from here on.
        waiting: bytes that are held.
        late: rows of copies that came when it was forgotten whether one of their kind had gone, and were left out.
        differing: sites whose copies differ, with the first step that was seen.
    """

    def __init__(self, sites: SharedSites, span: range, how: Mapping[str, str] | None = None) -> None:
        self.sites = sites
        self._span = span
        self.how = dict(how or {})
        self.is_top = False
        self.waiting = 0
        self.late = 0
        self.differing: dict[str, Disagreement] = {}
        self._held: dict[When, dict[MomentKey, list[RankedRows]]] = {}
        self._gone: OrderedDict[int, dict[MomentKey, GoneCopies]] = OrderedDict()
        self._forgotten = -1
        self._counted: dict[When, list[tuple[frozenset[int], range]]] = {}

    def add(self, rows: RankedRows, turn: int = 0) -> None:
        """Hold rows of one moment, of this turn of the ranks."""
        self.waiting += rows.size
        when = rows.batch.moment.step, turn
        self._held.setdefault(when, {}).setdefault(rows.key, []).append(rows)

    def count_elsewhere(self, when: When, ranks: Iterable[int], span: range) -> None:
        """Note that these ranks' copies have counted already, if all who hold the same are in the span."""
        marks = self._counted.setdefault(when, [])
        marks.append((frozenset(ranks), span))
        while len(self._counted) > _MARKED:
            first = min(self._counted)
            del self._counted[first]
            self._forgotten = max(self._forgotten, first[0])

    def reset(self, forgotten: int = -1) -> None:
        """Forget rows and copies, those that are held and those that have gone.

        Args:
            forgotten: the last step of which nobody knows any more whose copies have counted.
        """
        self._held, self._gone, self._counted = {}, OrderedDict(), {}
        self.waiting, self._forgotten = 0, forgotten

    def take(self, before: int | None = None) -> Iterator[RankedRows]:
        """Merge and take what is held of earlier steps than this one; of all where it is None."""
        for when in sorted(self._held):
            if before is None or when[0] < before:
                yield from self.take_turn(when)

    def take_turn(self, when: When) -> Iterator[RankedRows]:
        """Merge and take what is held of one step and turn."""
        moments = self._held.pop(when, {})
        for key, parts in moments.items():
            self.waiting -= sum(part.size for part in parts)
            if len(self._span) == 1 and not self.is_top:  # nobody is below: all of it is this rank's own
                yield from parts
                continue
            merged = self._merge(key, when, parts)
            if merged is not None:
                yield merged

    def _merge(self, key: MomentKey, when: When, parts: Sequence[RankedRows]) -> RankedRows | None:
        rows = np.frombuffer(b"".join(part.batch.rows for part in parts), ROW)
        sources = np.frombuffer(b"".join(part.sources for part in parts), np.int32)
        owners = np.frombuffer(b"".join(part.owners for part in parts), np.int32).astype(np.int64)
        is_copy = owners != OWN
        owners[is_copy] = self.sites.find_owners(rows["row"][is_copy], owners[is_copy])
        kept = self._choose(key, rows, owners, sources)
        kept &= ~self._find_counted(when, rows["row"], owners)
        owners = self._settle(rows["row"], owners)
        if self.is_top and len(parts) == 1 and kept.all() and len(np.unique(rows["row"])) == len(rows):
            return parts[0]  # of one rank, and each site once: there is nothing to merge
        groups, n_groups, first = _group(_make_keys(rows["row"], owners)[kept])
        if not n_groups:
            return None
        table, chosen = rows[kept], np.flatnonzero(kept)
        merged = np.zeros(n_groups, ROW)
        merged["row"] = table["row"][first]
        for name, column in merge_rows({name: table[name] for name in ROW.names or ()}, groups, n_groups).items():
            merged[name] = column
        bins = np.frombuffer(b"".join(part.batch.bins for part in parts), np.int64)
        stretches = _merge_histograms(rows, bins, chosen, groups, merged)
        custom = self._merge_custom(parts, rows, chosen, groups, merged)
        batch = replace(parts[0].batch, rows=merged.tobytes(), bins=stretches, custom=custom)
        return RankedRows(
            batch, owners[chosen][first].astype(np.int32).tobytes(), sources[chosen][first].astype(np.int32).tobytes()
        )

    def _settle(self, codes: npt.NDArray[Any], owners: IntArray) -> IntArray:
        """Owners from here on: copies of which no further ones can come are a part of what adds up."""
        if self.is_top:
            return np.full(len(owners), OWN)
        is_copy = owners != OWN
        ends = self.sites.find_ends(codes[is_copy], owners[is_copy])
        is_here = (owners[is_copy] >= self._span.start) & (ends < self._span.stop)
        settled = owners.copy()
        settled[is_copy] = np.where(is_here, OWN, owners[is_copy])
        return settled

    # ---- copies ---------------------------------------------------------------------------------------------------

    def _choose(
        self, key: MomentKey, rows: npt.NDArray[Any], owners: IntArray, sources: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.bool_]:
        """Mark the rows that count: of copies those of one rank, the lowest that has come."""
        kept = np.ones(len(rows), np.bool_)
        places = np.flatnonzero(owners != OWN)
        if not len(places):
            return kept
        if key[0] <= self._forgotten and key[0] not in self._gone:
            kept[places] = False
            self.late += len(places)
            return kept
        keys = _make_keys(rows["row"][places], owners[places])
        order = np.lexsort((sources[places], keys))
        keys, places = keys[order], places[order]
        of = sources[places].astype(np.int64)
        at = np.arange(len(order))
        is_first = np.concatenate(([True], keys[1:] != keys[:-1]))
        is_own = is_first | np.concatenate(([True], of[1:] != of[:-1]))
        first = np.maximum.accumulate(np.where(is_first, at, 0))
        own = np.maximum.accumulate(np.where(is_own, at, 0))
        self._compare(key[0], rows[places], of, first, own)
        chosen = of[first]
        gone = self._gone.get(key[0], {}).get(key)
        if gone is not None and len(gone.keys):
            found = np.minimum(np.searchsorted(gone.keys, keys), len(gone.keys) - 1)
            chosen = np.where(gone.keys[found] == keys, gone.sources[found], chosen)
        kept[places] = of == chosen
        self._remember(key, keys[is_first], chosen[is_first])
        return kept

    def _find_counted(self, when: When, codes: npt.NDArray[Any], owners: IntArray) -> npt.NDArray[np.bool_]:
        """Mark copies that have counted elsewhere."""
        found = np.zeros(len(codes), np.bool_)
        marks = self._counted.get(when, ())
        known: dict[tuple[int, ...], bool] = {}
        for place in np.flatnonzero(owners != OWN) if marks else ():
            group = self.sites.find_group(int(codes[place]), int(owners[place]))
            if group not in known:
                known[group] = any(
                    group[0] in span and group[-1] in span and not ranks.isdisjoint(group) for ranks, span in marks
                )
            found[place] = known[group]
        return found

    def _compare(self, step: int, rows: npt.NDArray[Any], sources: IntArray, first: IntArray, own: IntArray) -> None:
        """Note sites at which ranks that should hold the same do not."""
        at = np.arange(len(rows))
        partner = np.minimum(first + at - own, len(rows) - 1)
        differs = np.zeros(len(rows), np.bool_)
        for name in _COMPARED:
            differs |= rows[name] != rows[name][partner]
        differs &= own != first
        for place in np.flatnonzero(differs):
            site = self.sites.names[rows["row"][place]]
            self.note_difference(Disagreement(site, step, int(sources[first[place]]), int(sources[place])))

    def note_difference(self, found: Disagreement) -> None:
        """Note that copies differ at a site; of each the first step counts."""
        known = self.differing.get(found.site)
        if known is None or found.step < known.step:
            self.differing[found.site] = found

    def _remember(self, key: MomentKey, keys: IntArray, sources: IntArray) -> None:
        moments = self._gone.setdefault(key[0], {})
        if key in moments:
            earlier = moments[key]
            keys, first = np.unique(np.concatenate([earlier.keys, keys]), return_index=True)
            sources = np.concatenate([earlier.sources, sources])[first]
        moments[key] = GoneCopies(keys, sources)
        while len(self._gone) > _REMEMBERED:
            step = min(self._gone)
            del self._gone[step]
            self._forgotten = max(self._forgotten, step)

    # ---- users' statistics ----------------------------------------------------------------------------------------

    def _merge_custom(
        self,
        parts: Sequence[RankedRows],
        rows: npt.NDArray[Any],
        chosen: npt.NDArray[np.intp],
        groups: npt.NDArray[np.intp],
        merged: npt.NDArray[Any],
    ) -> dict[str, Any]:
        custom: dict[str, Any] = {}
        for name in dict.fromkeys(name for part in parts for name in part.batch.custom):
            values = np.concatenate([_spread_custom(part.batch, name) for part in parts])[chosen]
            calls = rows["calls"][chosen]
            column = merge_custom(values, self.how.get(name, "mean"), calls, groups, len(merged))
            given = ~np.isnan(column)
            custom[name] = (np.flatnonzero(given).tolist(), column[given].tolist())
        return custom


def _make_keys(codes: npt.NDArray[Any], owners: IntArray) -> IntArray:
    return codes.astype(np.int64) << 32 | (owners + 1)


def _group(keys: IntArray) -> tuple[npt.NDArray[np.intp], int, npt.NDArray[np.intp]]:
    """For each row the number of its group; how many there are; a row of each."""
    _, first, groups = np.unique(keys, return_index=True, return_inverse=True)
    return groups, len(first), first


def _spread_custom(batch: RowBatch, name: str) -> npt.NDArray[np.float64]:
    """A user's statistic of each row: the mean where it has several values, NaN where it has none."""
    size = len(batch.rows) // ROW.itemsize
    places, values = batch.custom.get(name, ((), ()))
    total = np.bincount(np.asarray(places, np.intp), np.asarray(values, np.float64), minlength=size)
    n = np.bincount(np.asarray(places, np.intp), minlength=size)
    spread: npt.NDArray[np.float64] = np.divide(total, n, out=np.full(size, np.nan), where=n > 0)
    return spread


def _merge_histograms(
    rows: npt.NDArray[Any],
    bins: npt.NDArray[np.int64],
    chosen: npt.NDArray[np.intp],
    groups: npt.NDArray[np.intp],
    merged: npt.NDArray[Any],
) -> bytes:
    """Add up the histograms of each group; its stretch is noted in ``merged``, and the bytes of all are returned."""
    lengths = rows["bins"].astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    order = np.argsort(groups, kind="stable")
    ends = np.searchsorted(groups[order], np.arange(0, len(merged) + _GROUPS_AT_ONCE, _GROUPS_AT_ONCE))
    found = []
    for number, (begin, end) in enumerate(itertools.pairwise(ends)):
        picked = chosen[order[begin:end]]
        base = number * _GROUPS_AT_ONCE
        here = merged[base : base + _GROUPS_AT_ONCE]
        counts = _spread_bins(rows, bins, starts, picked, groups[order[begin:end]] - base, len(here))
        is_used = counts > 0
        here["first_bin"] = np.where(is_used.any(axis=1), is_used.argmax(axis=1), 0)
        last = BINS - is_used[:, ::-1].argmax(axis=1)
        here["bins"] = np.where(is_used.any(axis=1), last - here["first_bin"], 0)
        columns = np.arange(BINS)
        inside = (columns >= here["first_bin"][:, None]) & (columns < (here["first_bin"] + here["bins"])[:, None])
        found.append(counts[inside].tobytes())
    return b"".join(found)


def _spread_bins(
    rows: npt.NDArray[Any],
    bins: npt.NDArray[np.int64],
    starts: IntArray,
    picked: npt.NDArray[np.intp],
    groups: npt.NDArray[np.intp],
    n_groups: int,
) -> IntArray:
    lengths = rows["bins"][picked].astype(np.int64)
    owner = np.repeat(np.arange(len(picked)), lengths)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    counts = np.zeros((n_groups, BINS), np.int64)
    place = groups[owner] * BINS + rows["first_bin"][picked].astype(np.int64)[owner] + within
    np.add.at(counts.reshape(-1), place, bins[starts[picked][owner] + within])
    return counts


def rank_rows(batch: RowBatch, codes: IntArray, sites: SharedSites, rank: int) -> RankedRows:
    """Rows of this process, by the codes of their sites.

    Args:
        batch: the rows as a recorder numbers them.
        codes: the code of each number.
        sites: who holds copies.
        rank: this process.
    """
    table = np.frombuffer(batch.rows, ROW).copy()
    place_of = {number: place for place, number in enumerate(table["row"].tolist())}
    table["row"] = codes[table["row"]]
    custom: dict[str, Any] = {}
    for name, (rows, values) in batch.custom.items():
        custom[name] = ([place_of[row] for row in rows], values)
    owners = sites.find_owners(table["row"], np.full(len(table), rank))
    sources = np.full(len(table), rank, np.int32)
    ranked = replace(batch, rows=table.tobytes(), custom=custom)
    return RankedRows(ranked, owners.astype(np.int32).tobytes(), sources.tobytes())


def count_from_end(rows: RankedRows, last: int) -> list[RankedRows]:
    """Rows of one rank; for copies in training the micro-batch is counted from the end of the step: −1 is the last.

    There ranks that had different numbers of micro-batches reduce.

    Args:
        rows: by the numbers of their micro-batches.
        last: that of the last micro-batch.
    """
    moment = rows.batch.moment
    is_copy = np.frombuffer(rows.owners, np.int32) != OWN
    if moment.phase != "train" or not is_copy.any():
        return [rows]
    copies = replace(rows, batch=replace(rows.batch, moment=replace(moment, micro=moment.micro - last - 1)))
    return [copies] if is_copy.all() else [_pick(rows, ~is_copy), _pick(copies, is_copy)]


def count_from_begin(batches: Sequence[RowBatch], last: int) -> list[RowBatch]:
    """Batches of one step whose micro-batches are counted from its beginning again, ``last`` being the last one."""
    found = []
    for batch in batches:
        moment = batch.moment
        micro = moment.micro if moment.micro >= 0 else max(last + 1 + moment.micro, 0)
        found.append(replace(batch, moment=replace(moment, micro=micro)))
    return found


def _pick(rows: RankedRows, mask: npt.NDArray[np.bool_]) -> RankedRows:
    table = np.frombuffer(rows.batch.rows, ROW)
    bins = np.frombuffer(rows.batch.bins, np.int64)[np.repeat(mask, table["bins"])]
    new_place = np.cumsum(mask) - 1
    custom: dict[str, Any] = {}
    for name, (places, values) in rows.batch.custom.items():
        pairs = [(int(new_place[place]), value) for place, value in zip(places, values, strict=True) if mask[place]]
        custom[name] = ([place for place, _ in pairs], [value for _, value in pairs])
    owners, sources = (np.frombuffer(each, np.int32)[mask].tobytes() for each in (rows.owners, rows.sources))
    batch = replace(rows.batch, rows=table[mask].tobytes(), bins=bins.tobytes(), custom=custom)
    return RankedRows(batch, owners, sources)


def unrank_rows(rows: RankedRows) -> RowBatch:
    """Rows as a sink takes them whose rows have been named by their codes."""
    batch = rows.batch
    if not batch.custom:
        return batch
    codes = np.frombuffer(batch.rows, ROW)["row"]
    custom: dict[str, Any] = {}
    for name, (places, values) in batch.custom.items():
        custom[name] = (codes[np.asarray(places, np.intp)].tolist(), values)
    return replace(batch, custom=custom)


class LossMeans:
    """The losses of each moment, added up over ranks."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int, int, Phase], tuple[int, float]] = {}

    def add(self, step: int, micro: int, backward: int, phase: Phase, n: int, total: float) -> None:
        """Add losses of a moment: how many, and their sum."""
        key = step, micro, backward, phase
        known_n, known_total = self._held.get(key, (0, 0.0))
        self._held[key] = known_n + n, known_total + total

    def take(self, before: int | None = None) -> Iterable[tuple[int, int, int, Phase, int, float]]:
        """Take those of earlier steps than this one; all where it is None."""
        keys = sorted(key for key in self._held if before is None or key[0] < before)
        return [(*key, *self._held.pop(key)) for key in keys]
