"""Rows of a record as columns of numbers: decoded from batches of bytes, loaded when first asked for, merged.

A recorder hands over bytes, which costs the training thread nothing. They are decoded later, many batches at once,
without a loop over rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.core.errors import PatternError
from retrograd.core.history.copies import Copies
from retrograd.core.history.sink import PHASES, RowBatch
from retrograd.core.statistics.row import BINS, ROW, scale_rows

Columns = dict[str, npt.NDArray[Any]]
"""Columns of equal length, except ``bins``: the histogram ranges of all rows, one after the other, ``bin_count`` each.

``phase`` is an index into :data:`retrograd.core.history.sink.PHASES`, ``site`` the number of a site's name.
"""

MOMENT_TYPES = {"step": np.int64, "micro": np.int32, "backward": np.int16, "phase": np.uint8}
ROW_TYPES = {name: ROW[name] for name in ROW.names or () if name not in ("row", "first_bin", "bins")}
FIXED_TYPES: dict[str, Any] = {
    **MOMENT_TYPES,
    "site": np.int32,
    "rank": np.int32,
    **ROW_TYPES,
    "scale": np.float64,
    "first_bin": np.int16,
    "bin_count": np.int32,
    "bins": np.int64,
}
"""Columns that are always there; one float64 column may follow for each user statistic."""

OF_HISTOGRAMS = frozenset({"first_bin", "bin_count", "bins"})
"""Columns without which there are rows, but no histograms."""

CALLS_OF = "calls:"
"""Before the name of a user's statistic: how many of the calls of a merged row have a value of it, if not all have."""

_PHASE_CODES: dict[str, int] = {phase: code for code, phase in enumerate(PHASES)}


def decode_batches(
    batches: Sequence[RowBatch],
    gradients: npt.NDArray[np.bool_],
    rank: int = 0,
    codes: npt.NDArray[np.integer] | None = None,
) -> Columns:
    """Columns of the rows of many batches, in order, or by site.

    A gradient's row gets the batch's backward pass, and the loss scale is divided out of it: exactly when the
    scale is a power of two, else to rounding, with the histogram moved by the nearest whole exponent. Any
    other row belongs to no pass and was not scaled.

    Args:
        batches: what was added.
        gradients: for each site, by number, whether it is a gradient.
        rank: the rank that all of it is from.
        codes: for each site, by number, its code: rows are sorted by it, as :func:`order_by_site` does.
    """
    rows = np.frombuffer(b"".join(batch.rows for batch in batches), ROW)
    bins = np.frombuffer(b"".join(batch.bins for batch in batches), np.int64)
    lengths = [len(batch.rows) // ROW.itemsize for batch in batches]
    columns = _repeat_moments(batches, lengths)
    columns["scale"] = np.repeat([float(batch.scale) for batch in batches], lengths)
    columns.update(_decode_custom(batches, lengths, rows["row"]))
    if codes is not None:
        order = order_by_site(codes[rows["row"]], columns["step"])
        starts = np.cumsum(rows["bins"], dtype=np.int64) - rows["bins"]
        rows = rows.take(order)  # 30 times as fast as rows[order], which copies field by field
        bins = bins[count_up(starts[order], rows["bins"])]
        columns = {name: column.take(order) for name, column in columns.items()}
    is_gradient = gradients[rows["row"]]
    columns["backward"] = np.where(is_gradient, columns["backward"], np.int16(-1))
    columns["scale"] = np.where(is_gradient, columns["scale"], 1.0)
    columns["site"] = rows["row"]
    columns["rank"] = np.full(len(rows), rank, np.int32)
    for name in ROW_TYPES:
        columns[name] = rows[name]  # a view: copying what may never be read costs most of the decoding
    columns["first_bin"] = rows["first_bin"].astype(np.int16)
    columns["bin_count"], columns["bins"] = rows["bins"], bins
    _divide_out_scale(columns)
    return columns


def order_by_site(sites: npt.NDArray[np.integer], steps: npt.NDArray[np.integer]) -> npt.NDArray[np.intp]:
    """Where the rows are, sorted by site, those of each by step, in the order in which they were."""
    if (np.diff(steps) < 0).any():
        return np.lexsort((steps, sites))
    small = sites.astype(np.uint16) if sites.max(initial=0) < 1 << 16 else sites  # sorted by radix, ten times as fast
    return np.argsort(small, kind="stable")


def encode_phase(phase: str) -> int:
    """The code of a phase.

    Raises:
        PatternError: for an unknown phase (a ValueError).
    """
    if phase not in _PHASE_CODES:
        raise PatternError(f"{phase!r} is no phase.", repair=f"give one of {', '.join(PHASES)}, or None for all.")
    return _PHASE_CODES[phase]


def concatenate_columns(parts: Sequence[Mapping[str, npt.NDArray[Any]]], name: str) -> npt.NDArray[Any]:
    """One column over several sets of columns; where a set lacks a user's statistic it is NaN.

    Raises:
        KeyError: a set lacks one of our own columns.
    """
    has_always = name in FIXED_TYPES
    pieces = [part[name] if has_always or name in part else np.full(len(part["step"]), np.nan) for part in parts]
    if not pieces:
        return np.empty(0, FIXED_TYPES.get(name, np.float64))
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _repeat_moments(batches: Sequence[RowBatch], lengths: list[int]) -> Columns:
    moments = [batch.moment for batch in batches]
    values = {
        "step": [moment.step for moment in moments],
        "micro": [moment.micro for moment in moments],
        "backward": [moment.backward for moment in moments],
        "phase": [_PHASE_CODES[moment.phase] for moment in moments],
    }
    return {name: np.repeat(np.array(values[name], kind), lengths) for name, kind in MOMENT_TYPES.items()}


def _divide_out_scale(columns: Columns) -> None:
    scale = columns["scale"]
    if np.all(scale == 1.0):
        return
    scale_rows(columns, 1.0 / scale)
    shift = np.rint(np.log2(scale)).astype(np.int64)
    last = BINS - 1
    first_bin, bin_count = columns["first_bin"] - shift, columns["bin_count"].astype(np.int64)
    if np.all((first_bin >= 0) & (first_bin + bin_count <= BINS)):
        columns["first_bin"] = first_bin.astype(np.int16)
        return
    # Some bins leave the range, and are merged into the first or the last one.
    owner = np.repeat(np.arange(len(scale)), bin_count)
    place = np.clip(count_up(first_bin, bin_count), 0, last)
    starts = np.flatnonzero(np.diff(owner * BINS + place, prepend=-1))
    columns["bins"] = np.add.reduceat(columns["bins"], starts) if len(starts) else columns["bins"]
    columns["bin_count"] = np.bincount(owner[starts], minlength=len(scale)).astype(np.int32)
    columns["first_bin"] = np.clip(first_bin, 0, last).astype(np.int16)


def count_up(starts: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """For each of some stretches its numbers, one after the other: start, start + 1, … as many as it is long."""
    before = np.cumsum(lengths, dtype=np.int64) - lengths
    return np.asarray(np.repeat(starts - before, lengths) + np.arange(int(lengths.sum())), np.int64)


def _decode_custom(batches: Sequence[RowBatch], lengths: list[int], sites: npt.NDArray[np.int32]) -> Columns:
    """Columns of users' statistics: the mean where a site's row has several values, NaN where it has none."""
    names = dict.fromkeys(name for batch in batches for name in batch.custom)
    if not names:
        return {}
    owners = np.repeat(np.arange(len(batches), dtype=np.int64), lengths)
    keys = owners << 32 | sites
    order = np.argsort(keys, kind="stable")
    return {name: _place_custom(batches, name, keys, order) for name in names}


def _place_custom(
    batches: Sequence[RowBatch], name: str, keys: npt.NDArray[np.int64], order: npt.NDArray[np.intp]
) -> npt.NDArray[np.float64]:
    given = [(number, *batch.custom[name]) for number, batch in enumerate(batches) if name in batch.custom]
    wanted = np.concatenate([number << 32 | np.asarray(rows, np.int64) for number, rows, _ in given])
    values = np.concatenate([np.asarray(values, np.float64) for _, _, values in given])
    places = order[np.minimum(np.searchsorted(keys, wanted, sorter=order), len(order) - 1)] if len(order) else order
    if len(places) != len(wanted) or np.any(keys[places] != wanted):
        raise ValueError(f"the statistic {name!r} has values for rows that are not in its batch")
    total, n = np.zeros(len(keys)), np.zeros(len(keys))
    np.add.at(total, places, values)
    np.add.at(n, places, 1.0)
    column: npt.NDArray[np.float64] = np.divide(total, n, out=np.full(len(keys), np.nan), where=n > 0)
    return column


# ---- all rows of a record ----

Part = Mapping[str, npt.NDArray[Any]]
"""Columns of some of the rows, in memory or still in a file."""

Index = npt.NDArray[np.int64] | slice


class StoredPart(Mapping[str, npt.NDArray[Any]]):
    """Columns of a part of a record that is stored elsewhere, and can be read in pieces.

    Attributes:
        rank: the rank that all of it is from.
        count: number of rows.
        codes: codes of the sites that have rows in it, rising.
        orders: for each of them its lowest order; the largest integer where it is not known.
        step_limits: the first and the last step.
        step_runs: for each phase, by its code, the steps that have rows, as runs of even gaps: first, last and gap.
        ends: the last step of each piece.
        is_far: reading it is mostly waiting, as for a store.
        left_out: number of rows that are not read, since the part turned out to be damaged.
        entries: number of entries of all histograms.
    """

    is_far = False
    left_out = 0
    rank: int
    count: int
    entries: int
    codes: npt.NDArray[np.int32]
    orders: npt.NDArray[np.int64]
    step_limits: tuple[int, int]
    step_runs: Mapping[int, npt.NDArray[np.int64]]
    ends: Sequence[int]

    @abstractmethod
    def plan(
        self,
        names: Sequence[str],
        first: int | None = None,
        last: int | None = None,
        codes: npt.NDArray[np.integer] | None = None,
        *,
        nonfinite: bool = False,
    ) -> Iterator[Callable[[], Part]]:
        """Calls that read some columns, a piece each, in order.

        Args:
            names: of the columns.
            first: the first step that is asked for; pieces that have no step between it and the last are left out.
            last: the last one.
            codes: the sites that are asked for; pieces that are known to have no row of them are left out.
            nonfinite: leave out pieces of which all elements are known to be finite.
        """

    def check(self) -> None:
        """Find out whether it can be read.

        Whoever reads one column after the other asks for it first: they must have the same rows.
        """


def count_entries(part: Part) -> int:
    """The number of entries of all histograms."""
    return part.entries if isinstance(part, StoredPart) else len(part["bins"])


def pick_columns(columns: Part, mask: npt.NDArray[np.bool_]) -> Part:
    """The rows of some columns that are marked."""
    index = np.flatnonzero(mask)
    if len(index) == len(mask):
        return columns
    picked = {name: pick_column(column, index) for name, column in columns.items() if name != "bins"}
    if "bins" in columns:
        picked["bins"] = columns["bins"][np.repeat(mask, columns["bin_count"])]
    return picked


def leave_earlier_out(columns: Part, step: int) -> Part | None:
    """The rows from the first one on that is of a step, or of a later one; None where there is none."""
    wanted = columns["step"] >= step
    if not len(wanted) or not wanted.any():
        return None
    start = int(wanted.argmax())
    if start == 0:
        return columns
    first_bin = int(columns["bin_count"][:start].sum(dtype=np.int64))
    return {name: column[first_bin if name == "bins" else start :] for name, column in columns.items()}


def pick_column(column: npt.NDArray[Any], index: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Some rows of a column; one number for all of them stays one."""
    return np.broadcast_to(column[0], len(index)) if is_constant(column) else column[index]


def is_constant(column: npt.NDArray[Any]) -> bool:
    """Return whether one number stands for all rows, as ``np.broadcast_to`` gives it."""
    return column.strides == (0,) and len(column) > 0


class Rows(Mapping[str, npt.NDArray[Any]]):
    """All rows of a record at one time, as columns over several parts. Never changes: adding rows makes a new one.

    Args:
        parts: where the columns come from.
        earlier: rows as they were before; columns loaded from them are used again where the parts are the same.
        merges: how a user's statistic merges, by its name: ``mean`` over tensors (the default), ``sum``,
            ``min`` or ``max``.
        copies: which ranks hold the same tensors; None where none do, or where that is unknown.
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
            held = earlier._loaded.copy()  # another thread may read a column meanwhile
            self._carried = {
                **earlier._carried,
                **{name: (len(earlier.parts), column) for name, column in held.items()},
            }

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name not in self:
            raise KeyError(name)
        column = self._loaded.get(name)
        if column is None:
            column = self._loaded[name] = self._load(name)
        return column

    def __contains__(self, name: object) -> bool:
        return name in FIXED_TYPES or name in self._added

    def __iter__(self) -> Iterator[str]:
        yield from FIXED_TYPES
        yield from self._added

    def __len__(self) -> int:
        return len(FIXED_TYPES) + len(self._added)

    @property
    def count(self) -> int:
        """Number of rows."""
        return sum(part.count if isinstance(part, StoredPart) else len(part["step"]) for part in self.parts)

    @property
    def left_out(self) -> int:
        """Number of rows that cannot be read, as far as that was found out."""
        return sum(part.left_out for part in self.parts if isinstance(part, StoredPart))

    def in_pieces(self) -> Iterator[Part]:
        """All rows, piece by piece where they are too many to be held at once."""
        yield self

    def read(self, name: str) -> npt.NDArray[Any]:
        """A column, which a record that is too long to hold columns reads anew each time."""
        return self[name]

    @cached_property
    def codes(self) -> npt.NDArray[np.int64]:
        """Codes of the sites that have rows, rising."""
        stored = [part.codes for part in self.parts if isinstance(part, StoredPart)]
        held = [np.bincount(part["site"]).nonzero()[0] for part in self.parts if not isinstance(part, StoredPart)]
        return np.unique(np.concatenate([np.empty(0, np.int64), *stored, *held])).astype(np.int64)

    @cached_property
    def ranks(self) -> list[int]:
        """Ranks that have rows, rising."""
        stored = {part.rank for part in self.parts if isinstance(part, StoredPart) and part.count}
        held = (part["rank"] for part in self.parts if not isinstance(part, StoredPart))
        return sorted(stored.union(*(map(int, np.unique(ranks)) for ranks in held)))

    @property
    def step_limits(self) -> tuple[int, int] | None:
        """The first and the last step; None where there are no rows, or none can be read."""
        steps = self["step"]
        return (int(steps.min()), int(steps.max())) if len(steps) else None

    def only(self, codes: Iterable[int]) -> Rows:
        """Rows among which are those of some sites, in their order, and held."""
        return self

    def hold(
        self, codes: Iterable[int], names: Sequence[str], first: int | None = None, last: int | None = None
    ) -> Part:
        """Some columns of the rows of some sites, in their order.

        Args:
            codes: of the sites.
            names: of the columns.
            first: the first step that is asked for.
            last: the last one.
        """
        mask = np.isin(self["site"], list(codes))
        mask &= True if first is None else self["step"] >= first
        mask &= True if last is None else self["step"] <= last
        picked = Picked(self, np.flatnonzero(mask))
        return {name: picked[name] for name in names}

    def spans(self, most: int) -> Iterator[tuple[int, int]]:
        """The first and the last of some steps after the others: of a record that is not held about ``most`` rows."""
        if (limits := self.step_limits) is not None:
            yield limits

    def merged(self, phase: str | None, codes: Iterable[int], names: Iterable[str] | None = None) -> Iterator[Rows]:
        """Rows of which those of some sites, merged by site and step, say the same as all do; by rising step.

        Args:
            phase: kind of forward; None for all.
            codes: of the sites.
            names: the columns of numbers that will be asked for, see
                :func:`retrograd.core.statistics.row.list_columns`, and users' statistics; all when left out.
        """
        yield self

    def by_steps(self, most: int) -> Iterator[Rows]:
        """The same rows; where they lie in the order of their steps, some steps at a time, about ``most`` rows."""
        yield self

    def pieces(
        self,
        names: Sequence[str],
        first: int | None = None,
        last: int | None = None,
        codes: npt.NDArray[np.integer] | None = None,
    ) -> Iterator[Part]:
        """Some columns of all rows, not more at once than are held anyway.

        Args:
            names: of the columns.
            first: the first step that is asked for.
            last: the last one; what has no step between the two may be left out.
            codes: the sites that are asked for, rising; what has none of them may be left out.
        """
        yield {name: self[name] for name in names}

    def nonfinite_pieces(self, names: Sequence[str]) -> Iterator[Part]:
        """As :meth:`pieces`, without those of which all elements are known to be finite."""
        yield from self.pieces(names)

    @cached_property
    def custom(self) -> list[str]:
        """Names of users' statistics."""
        return [name for name in self._added if not name.startswith(CALLS_OF)]

    @cached_property
    def _added(self) -> list[str]:
        """Columns that not every record has."""
        return list(dict.fromkeys(name for part in self.parts for name in part if name not in FIXED_TYPES))

    @cached_property
    def bin_starts(self) -> npt.NDArray[np.int64]:
        """Where each row's histogram begins in ``bins``."""
        lengths = self["bin_count"].astype(np.int64)
        return np.cumsum(lengths) - lengths

    def of_site(self, code: int) -> npt.NDArray[np.int64]:
        """Numbers of the rows of one site, in order."""
        order, ends = self._by_site
        return order[ends[code] : ends[code + 1]] if code + 1 < len(ends) else order[:0]

    def counts(self, index: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Mark the rows that are not copies of others among them; warn where copies differ."""
        if self.copies is None:
            return np.ones(len(index), np.bool_)
        counts, different = self.copies.count(self, index)
        self.copies.tell(different)
        return counts

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
    """Some of the rows; a column is indexed only when it is asked for."""

    def __init__(self, rows: Rows, index: Index) -> None:
        self.rows = rows
        self.index = index

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name != "bins":
            return self.rows[name][self.index]
        return self.rows["bins"][count_up(self.rows.bin_starts[self.index], self["bin_count"].astype(np.int64))]

    def __contains__(self, name: object) -> bool:
        return name in self.rows

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def join_rows(several: Iterable[Rows]) -> Rows:
    """The rows of some steps after the other as one."""
    listed = list(several)
    return (
        listed[0]
        if len(listed) == 1
        else Rows([part for rows in listed for part in rows.parts], None, listed[0].merges)
    )


def join_neighbours(parts: Sequence[Part]) -> list[Part]:
    """Join the last parts while they are of similar size, so that parts stay few and each row moves seldom."""
    joined = list(parts)
    while len(joined) > 1 and len(joined[-2]["step"]) <= 2 * len(joined[-1]["step"]):
        last_two = joined[-2:]
        names = dict.fromkeys(name for part in last_two for name in part)
        joined[-2:] = [{name: concatenate_columns(last_two, name) for name in names}]
    return joined
