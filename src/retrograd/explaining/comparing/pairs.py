"""Pairs of rows of two records, of the same site at the same moment, in the order in which training reached them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrograd.core.history.cells import merge_picked
from retrograd.core.history.history import History
from retrograd.core.history.rows import ROW_TYPES, Picked, Rows, encode_phase

IntArray = npt.NDArray[np.int64]

_FIRST_CALL = re.compile(r"#1(?=:)")
_MOMENT = ("step", "micro", "backward", "phase")


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Rows that belong together.

    Attributes:
        names: the sites that both have.
        site: for each pair the index of its site in ``names``.
        a, b: row numbers in both records.
        rows_a, rows_b: those records.
        missing_a, missing_b: number of rows that only the other has, of shared sites, up to the last shared step.
    """

    names: list[str]
    site: IntArray
    a: IntArray
    b: IntArray
    rows_a: Rows
    rows_b: Rows
    missing_a: int
    missing_b: int

    def __len__(self) -> int:
        return len(self.a)

    def columns(self, name: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """A column of the rows of both runs."""
        return self.column(name, 0), self.column(name, 1)

    def of_a(self, name: str) -> npt.NDArray[Any]:
        """A column of the rows of the first run."""
        return self.column(name, 0)

    def column(self, name: str, which: int) -> npt.NDArray[Any]:
        """A column of the rows of the first run, or of the second for 1."""
        rows, index = ((self.rows_a, self.a), (self.rows_b, self.b))[which]
        return rows.read(name)[index]


def plain_name(name: str) -> str:
    """The name of a site without marks of compilation, and without the number of a first call."""
    return _FIRST_CALL.sub("", name.replace("_orig_mod.", ""))


def plain_names(names: Sequence[str]) -> list[str]:
    """The plain names of the sites of one run; those that would have the same one keep their own."""
    plain = [plain_name(name) for name in names]
    many = Counter(plain)
    return [name if many[short] > 1 else short for name, short in zip(names, plain, strict=True)]


def pair_rows(a: History, b: History) -> Pairs:
    """Pair the rows of two records, of the same rank; of two that have a single rank each, whatever these are.

    Where the ranks of one are merged, as in a compacted run, those of the other are merged as well.
    """
    rows_a, rows_b = a.rows, b.rows
    if _is_merged(a) != _is_merged(b):
        rows_a, rows_b = (rows if len(rows.ranks) < 2 else _merge_ranks(rows) for rows in (rows_a, rows_b))
    names_a, names_b = (plain_names(each.site_names) for each in (a, b))
    shared = {name: number for number, name in enumerate(name for name in names_a if name in set(names_b))}
    last = min(_last_step(rows_a), _last_step(rows_b))
    picked_a, codes_a = _pick(rows_a, names_a, shared, last)
    picked_b, codes_b = _pick(rows_b, names_b, shared, last)
    both = (_Digits(rows_a, picked_a, codes_a), _Digits(rows_b, picked_b, codes_b))
    are_single = max(len(rows_a.ranks), len(rows_b.ranks)) < 2
    told = ("site", *_MOMENT, *(() if are_single else ("rank",)))
    key_a, key_b = _make_keys([each.read(name) for each in both] for name in told)
    if np.array_equal(key_a, key_b):
        at_a = at_b = np.arange(len(key_a))
    else:
        _, at_a, at_b = np.intersect1d(key_a, key_b, assume_unique=True, return_indices=True)
    missing_a, missing_b = len(key_b) - len(at_b), len(key_a) - len(at_a)
    del key_a, key_b
    index_a, index_b = picked_a[at_a], picked_b[at_b]
    del picked_a, picked_b, at_a, at_b, both
    order = _order_of_execution(rows_a, index_a)
    index_a, index_b = index_a[order], index_b[order]
    del order
    site = codes_a[rows_a.read("site")[index_a]]
    return Pairs(list(shared), site, index_a, index_b, rows_a, rows_b, missing_a, missing_b)


def _is_merged(history: History) -> bool:
    return len(history.manifest.get("compacted", {}).get("ranks", ())) > 1


def _merge_ranks(rows: Rows) -> Rows:
    """Rows of one moment and site on all ranks as one; copies count once."""
    index, moments = np.arange(rows.count), {name: rows[name] for name in ("site", "rank", *_MOMENT)}
    if rows.copies is not None:
        index, moments = index[rows.copies.count(rows, index)[0]], dict(rows.copies.align(moments))
    del moments["rank"]
    moments = {name: column[index] for name, column in moments.items()}
    keys = [np.zeros(len(index), np.int64)]
    for column in moments.values():
        _append(keys, [column.astype(np.int64) + 1])
    _, first, groups = np.unique(keys[0], return_index=True, return_inverse=True)
    merged = merge_picked(Picked(rows, index), groups, len(first), ROW_TYPES)
    one_each = {name: column[first] for name, column in moments.items()}
    return Rows([{**merged, **one_each, "rank": np.zeros(len(first), np.int32)}])


def _last_step(rows: Rows) -> int:
    limits = rows.step_limits
    return -1 if limits is None else limits[1]


def _pick(rows: Rows, names: Sequence[str], shared: dict[str, int], last: int) -> tuple[IntArray, IntArray]:
    """Rows of shared sites up to a step; and for each code of a site its number among the shared ones, or −1."""
    codes = np.array([shared.get(name, -1) for name in names], np.int64)
    if not len(names):
        return np.empty(0, np.int64), codes
    return np.flatnonzero((codes >= 0)[rows.read("site")] & (rows.read("step") <= last)), codes


class _Digits(NamedTuple):
    """Some rows, of which site, moment and rank are read as digits that begin at zero."""

    rows: Rows
    picked: IntArray
    codes: IntArray

    def read(self, name: str) -> IntArray:
        """One digit of each row."""
        values = self.rows.read(name)[self.picked]
        if name == "site":
            return self.codes[values] if len(values) else np.empty(0, np.int64)
        return values.astype(np.int64) + 1


def _make_keys(digits: Iterable[Sequence[IntArray]]) -> tuple[IntArray, IntArray]:
    """Make a key for each row of two records, of the digits of both; equal rows are numbered."""
    keys: list[IntArray] = []
    for pair in digits:
        keys = keys or [np.zeros(len(each), np.int64) for each in pair]
        _append(keys, pair)
    _append(keys, [_count_repeats(key) for key in keys])
    return keys[0], keys[1]


def _append(keys: list[IntArray], digits: Sequence[IntArray]) -> None:
    size = 1 + max(int(each.max(initial=0)) for each in digits)
    keys[:] = [key * size + each for key, each in zip(keys, digits, strict=True)]


def _count_repeats(key: IntArray) -> IntArray:
    """Count how often each key occurred before."""
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    again = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1
    found = np.zeros(len(key), np.int64)
    if len(again):
        begins = np.ones(len(key), np.bool_)
        begins[again] = False
        at = np.arange(len(key))
        found[order] = at - np.maximum.accumulate(np.where(begins, at, 0))
    return found


def _order_of_execution(rows: Rows, index: IntArray) -> IntArray:
    """Sort by step, micro-batch, kind of forward (others come before the training of their step), and order."""
    is_train = rows.read("phase")[index] == encode_phase("train")
    passes = np.maximum(rows.read("backward")[index], 0)
    order, micro, step = (rows.read(name)[index] for name in ("order", "micro", "step"))
    keys = (order, passes, is_train, micro, step)
    return np.lexsort(keys)
