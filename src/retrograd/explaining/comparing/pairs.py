"""Pairs of rows of two records, of the same site at the same moment, in the order in which training reached them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrograd.core.history.ahead import NEAR_READERS, read_ahead
from retrograd.core.history.cells import merge_picked
from retrograd.core.history.history import History
from retrograd.core.history.rows import ROW_TYPES, Part, Picked, Rows, encode_phase, pick_column
from retrograd.core.history.steps import number_steps
from retrograd.core.limits import LIMITS

IntArray = npt.NDArray[np.int64]

_FIRST_CALL = re.compile(r"#1(?=:)")
_MOMENT = ("step", "micro", "backward", "phase")


class Pairs:
    """Rows of some steps that belong together, in the order in which training reached them.

    Args:
        names: the sites that both records have.
        columns: the rows of both, by whose ``site`` is the place of a name.
        steps: the first and the last of the steps that they were looked for in.
        missing: how many rows of these steps only the second record has, and only the first one.
    """

    def __init__(
        self, names: list[str], columns: tuple[Part, Part], steps: tuple[int | None, int], missing: tuple[int, int]
    ) -> None:
        self.names, self.steps = names, steps
        self.missing_a, self.missing_b = missing
        self._columns = columns
        self.site: IntArray = columns[0]["site"]

    def __len__(self) -> int:
        return len(self.site)

    def columns(self, name: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """A column of the rows of both records."""
        return self.column(name, 0), self.column(name, 1)

    def of_a(self, name: str) -> npt.NDArray[Any]:
        """A column of the rows of the first record."""
        return self.column(name, 0)

    def column(self, name: str, which: int) -> npt.NDArray[Any]:
        """A column of the rows of the first record, or of the second for 1."""
        return self._columns[which][name]

    def of_step(self, step: int) -> tuple[int, Pairs]:
        """The place of the first pair of a step, and the pairs of that step, without what the others take."""
        start, end = np.searchsorted(self.of_a("step"), [step, step + 1]).tolist()
        one, other = ({name: column[start:end].copy() for name, column in each.items()} for each in self._columns)
        return start, Pairs(self.names, (one, other), (step, step), (0, 0))

    def raise_by_site(self, values: npt.NDArray[np.float64], before: npt.NDArray[np.float64]) -> None:
        """Make of values the largest so far of each site.

        Args:
            values: of the pairs, which are changed.
            before: for each site the largest of the pairs before these; becomes that of these, too.
        """
        largest, is_raised = before[self.site], np.zeros(len(before), np.bool_)
        is_raised[self.site[~(values <= largest)]] = True  # most often few: all else is as it was
        index = np.flatnonzero(is_raised[self.site])
        index = index[np.argsort(self.site[index], kind="stable")]
        sites, found = self.site[index], np.maximum(values, largest)[index]
        starts = np.flatnonzero(np.diff(sites, prepend=-1))
        lengths = np.diff(starts, append=len(sites))
        place, shift = np.arange(len(sites)) - np.repeat(starts, lengths), 1
        while shift < lengths.max(initial=0):
            later = np.flatnonzero(place >= shift)
            found[later] = np.maximum(found[later], found[later - shift])
            shift *= 2
        before[sites[starts]] = found[starts + lengths - 1]
        largest[index] = found
        values[:] = largest


def plain_name(name: str) -> str:
    """The name of a site without marks of compilation, and without the number of a first call."""
    return _FIRST_CALL.sub("", name.replace("_orig_mod.", ""))


def plain_names(names: Sequence[str]) -> list[str]:
    """The plain names of the sites of one run; those that would have the same one keep their own."""
    plain = [plain_name(name) for name in names]
    many = Counter(plain)
    return [name if many[short] > 1 else short for name, short in zip(names, plain, strict=True)]


class Pairing:
    """Pairs the rows of two records, of the same rank; of two that have a single rank each, whatever these are.

    Where the ranks of one are merged, as in a compacted run, those of the other are merged as well.

    Args:
        a: the first record.
        b: the other one.

    Attributes:
        names: the sites that both have.
    """

    def __init__(self, a: History, b: History) -> None:
        both = [plain_names(each.site_names) for each in (a, b)]
        others = set(both[1])
        self.names = [name for name in both[0] if name in others]
        shared = {name: number for number, name in enumerate(self.names)}
        is_one_merged = _is_merged(a) != _is_merged(b)
        self._sides = tuple(
            _Side(
                each.rows,
                np.array([shared.get(name, -1) for name in names], np.int64),
                is_one_merged and len(each.rows.ranks) > 1,
            )
            for each, names in zip((a, b), both, strict=True)
        )
        are_single = all(side.merges or len(side.rows.ranks) < 2 for side in self._sides)
        self._told = ("site", *_MOMENT, *(() if are_single else ("rank",)))
        self._last = min(-1 if (limits := each.rows.step_limits) is None else limits[1] for each in (a, b))

    def in_spans(self) -> Iterator[Pairs]:
        """The pairs of some steps after the others, up to the last step that both have."""
        longer = max((side.rows for side in self._sides), key=lambda rows: rows.count)
        ends = [last for _, last in longer.spans(LIMITS.rows_at_once) if last < self._last]
        firsts = [None, *(end + 1 for end in ends)]
        calls = (partial(self.between, first, end) for first, end in zip(firsts, [*ends, self._last], strict=True))
        return read_ahead(calls, NEAR_READERS)

    def between(self, first: int | None, last: int) -> Pairs:
        """The pairs of the steps from one on to another, as far as both records reach."""
        steps = first, min(last, self._last)
        a, b = (side.read(*steps) for side in self._sides)
        key_a, key_b = _make_keys(a, b, self._told)
        missing = 0, 0
        if not np.array_equal(key_a, key_b):
            _, at_a, at_b = np.intersect1d(key_a, key_b, assume_unique=True, return_indices=True)
            missing = len(key_b) - len(at_b), len(key_a) - len(at_a)
            a, b = _pick(a, at_a), _pick(b, at_b)
        order = _order_of_execution(a)
        return Pairs(self.names, (_pick(a, order), _pick(b, order)), steps, missing)


def _is_merged(history: History) -> bool:
    return len(history.manifest.get("compacted", {}).get("ranks", ())) > 1


class _Side(NamedTuple):
    """One of two records.

    Attributes:
        rows: its rows.
        shared: for the code of each site its number among those that both have, or −1.
        merges: its ranks are merged.
    """

    rows: Rows
    shared: IntArray
    merges: bool

    def read(self, first: int | None, last: int) -> Part:
        """Rows of shared sites at some steps; their sites have the numbers of shared ones."""
        columns = self.rows.hold(np.flatnonzero(self.shared >= 0), ("site", "rank", *_MOMENT, *ROW_TYPES), first, last)
        if self.merges:
            columns = _merge_ranks(Rows([columns], None, self.rows.merges, self.rows.copies))
        return {**columns, "site": self.shared[columns["site"]] if len(columns["site"]) else np.empty(0, np.int64)}


def _merge_ranks(rows: Rows) -> Part:
    """Rows of one moment and site on all ranks as one; copies count once."""
    index, moments = np.arange(rows.count), {name: rows[name] for name in ("site", "rank", *_MOMENT)}
    if rows.copies is not None:
        index, moments = index[rows.copies.count(rows, index)[0]], dict(rows.copies.align(moments))
    del moments["rank"]
    moments = {name: column[index] for name, column in moments.items()}
    [key] = _append_digits([np.zeros(len(index), np.int64)], [[column] for column in moments.values()])
    _, first, groups = np.unique(key, return_index=True, return_inverse=True)
    merged = merge_picked(Picked(rows, index), groups, len(first), ROW_TYPES)
    return {
        **merged,
        **{name: column[first] for name, column in moments.items()},
        "rank": np.zeros(len(first), np.int32),
    }


def _pick(columns: Part, index: IntArray) -> Part:
    return {name: pick_column(column, index) for name, column in columns.items()}


def _make_keys(a: Part, b: Part, told: Sequence[str]) -> list[IntArray]:
    """A key for each row of two records, of what it is told apart by; equal rows are numbered."""
    keys = [np.zeros(len(each["site"]), np.int64) for each in (a, b)]
    keys = _append_digits(keys, [[each[name] for each in (a, b)] for name in told])
    return _append_digits(keys, [[_count_repeats(key) for key in keys]])


def _append_digits(keys: list[IntArray], digits: Sequence[Sequence[npt.NDArray[Any]]]) -> list[IntArray]:
    """Keys with more digits, each from the lowest to the highest of its values in all of them."""
    for values in digits:
        joined = np.concatenate(values).astype(np.int64)
        low, high = (int(joined.min()), int(joined.max())) if len(joined) else (0, 0)
        if high - low > 4 * len(joined):
            joined, low = number_steps(joined)[1], 0
            high = int(joined.max())
        if low < high:
            split = np.split(joined - low, np.cumsum(list(map(len, values)))[:-1])
            keys = [key * (high - low + 1) + each for key, each in zip(keys, split, strict=True)]
    return keys


def _count_repeats(key: IntArray) -> IntArray:
    """Count how often each key occurred before."""
    found = np.zeros(len(key), np.int64)
    if len(key) < 2 or (np.diff(np.sort(key)) > 0).all():
        return found
    order = np.argsort(key, kind="stable")
    begins = np.diff(key[order], prepend=key[order[0]] - 1) != 0
    at = np.arange(len(key))
    found[order] = at - np.maximum.accumulate(np.where(begins, at, 0))
    return found


def _order_of_execution(rows: Part) -> IntArray:
    """Sort by step, micro-batch, kind of forward (others come before the training of their step), and order."""
    is_train, passes = rows["phase"] == encode_phase("train"), np.maximum(rows["backward"], 0)
    digits = (rows["step"], rows["micro"], is_train.astype(np.int64), passes, rows["order"])
    [key] = _append_digits([np.zeros(len(is_train), np.int64)], [[each] for each in digits])
    return np.argsort(key, kind="stable")
