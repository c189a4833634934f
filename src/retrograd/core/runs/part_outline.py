"""What a part file of statistics tells of its rows in its footer, so that opening a run reads no rows.

    retrograd.steps    {"rows": […], "steps": {"train": [[first, last, gap], …]}}: the rows of each row group, and for
                       each phase the steps that have rows, as runs of even gaps
    retrograd.sites    {"names": […], "orders": […], "present": […], "groups": […]}, packed by zlib, in base64: names,
                       for each its lowest order (−1 where it is not known), the places among them of those that have
                       rows (null: all), and for each row group the places of its sites (null: all that have rows)

What a file does not tell is read from its rows: those of an earlier version tell nothing, and what another tool has
made of a file of ours tells of other rows.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from retrograd.core.foreign.text import check_kinds, parse_object
from retrograd.core.history.arrays import encode_texts, read_codes, read_numbers, view_numbers
from retrograd.core.history.outline import NO_ORDER, IntArray, Outliner, count_runs, to_runs
from retrograd.core.history.sink import PHASES

STEPS = b"retrograd.steps"
SITES = b"retrograd.sites"
"""Keys of the metadata of a part file."""

OUTLINED = ("step", "phase", "site", "order")
"""Columns that an outline is made of."""

PHASE_CODES = {str(phase): code for code, phase in enumerate(PHASES)}

_LARGEST = 1 << 26
"""Bytes of an unpacked list of sites."""


@dataclass(frozen=True, slots=True)
class PartSites:
    """The sites of a part.

    Attributes:
        codes: of those that have rows, rising.
        orders: for each of them its lowest order; the largest integer where that is not known.
        of_groups: for row groups that lack some of them the codes of the others, rising.
    """

    codes: npt.NDArray[np.int32]
    orders: IntArray
    of_groups: Mapping[int, npt.NDArray[np.int32]]


class PartOutline:
    """The outline of a part that is written, or read without one.

    Attributes:
        code_of: the number of each name; those without rows are among them.
    """

    def __init__(self) -> None:
        self.code_of: dict[str, int] = {}
        self._outliner = Outliner()
        self._groups: list[npt.NDArray[np.int32]] = []
        self._rows: list[int] = []
        self._names: tuple[pa.Array, npt.NDArray[np.int32]] | None = None
        """Names that the last group has, and their numbers: groups of one table have the same."""

    def add(self, group: pa.Table) -> None:
        """Take in a row group, of which the columns :data:`OUTLINED` are needed; the last may be missing."""
        site = np.concatenate([np.empty(0, np.int32), *map(self._number_sites, group["site"].chunks)])
        order = np.full(len(site), -1)
        if "order" in group.column_names:
            column = group["order"]
            order = read_numbers(column.fill_null(-1) if column.null_count else column)
        phase = read_codes(group["phase"], dict(PHASE_CODES))
        self._outliner.add({"step": read_numbers(group["step"]), "phase": phase, "site": site, "order": order})
        self._groups.append(np.flatnonzero(np.bincount(site)).astype(np.int32))
        self._rows.append(len(site))

    def _number_sites(self, sites: pa.DictionaryArray) -> npt.NDArray[np.int32]:
        names = sites.dictionary
        if self._names is None or not self._names[0].equals(names):
            self._names = names, encode_texts(names, self.code_of)
        return np.asarray(self._names[1][view_numbers(sites.indices)], np.int32)

    def list_runs(self) -> dict[int, IntArray]:
        """For each phase, by its code, the steps that have rows, as :func:`retrograd.core.history.outline.to_runs`."""
        return {phase: to_runs(steps) for phase, steps in self._outliner.finish().steps.items()}

    def list_sites(self) -> PartSites:
        """The sites that have rows."""
        present = np.unique(np.concatenate([np.empty(0, np.int32), *self._groups]))
        of_groups = {number: codes for number, codes in enumerate(self._groups) if len(codes) < len(present)}
        return PartSites(present, self._outliner.orders[present], of_groups)

    def tell(self) -> dict[bytes, bytes]:
        """The metadata of the file."""
        known = len(self._outliner.orders)
        orders = np.where(self._outliner.orders == NO_ORDER, -1, self._outliner.orders).tolist()
        sites = self.list_sites()
        groups = [sites.of_groups.get(number) for number in range(len(self._groups))]
        told = {
            "names": list(self.code_of),
            "orders": orders + [-1] * (len(self.code_of) - known),
            "groups": [None if codes is None else codes.tolist() for codes in groups],
            "present": None if len(sites.codes) == len(self.code_of) else sites.codes.tolist(),
        }
        runs = {PHASES[code]: found.tolist() for code, found in self.list_runs().items()}
        steps = {"rows": self._rows, "steps": runs}
        packed = base64.b64encode(zlib.compress(json.dumps(told, separators=(",", ":")).encode(), 1))
        return {STEPS: json.dumps(steps, separators=(",", ":")).encode(), SITES: packed}


def read_runs(text: bytes, rows: list[int], limits: tuple[int, int]) -> dict[int, IntArray] | None:
    """The steps of each phase, as runs, that a file tells; None where it tells of other rows than it has.

    Args:
        text: of its metadata.
        rows: how many rows each of its row groups has.
        limits: its first and its last step.

    Raises:
        ValueError: it is something else, or there are more steps than rows.
    """
    told = parse_object(text)
    kinds = {"rows": list[int], "steps": dict[str, list[list[int]]]}
    check_kinds({**dict.fromkeys(kinds), **told}, kinds)
    found = {PHASE_CODES.get(phase, -1): _to_integers(listed).reshape(-1, 3) for phase, listed in told["steps"].items()}
    for phase, runs in found.items():
        low, high, gap = runs.T
        is_rising = (low <= high).all() and (gap > 0).all() and (high[:-1] < low[1:]).all()
        if phase < 0 or not is_rising or (high - low < 0).any() or count_runs(runs) > sum(told["rows"]):
            raise ValueError(f"{STEPS.decode()!r} of its metadata cannot be {text!r:.60}")
    ends = [(int(runs[0, 0]), int(runs[-1, 1])) for runs in found.values() if len(runs)]
    is_of_file = ends and (min(low for low, _ in ends), max(high for _, high in ends)) == limits
    return found if is_of_file and told["rows"] == rows else None


class SiteLists:
    """Lists of sites that parts tell; those of one rank are mostly the same, and then read once and held once.

    Attributes:
        code_of: the numbers of all names, to which those of parts are added.
    """

    def __init__(self, code_of: dict[str, int]) -> None:
        self.code_of = code_of
        self._read: dict[tuple[int, bytes], PartSites] = {}
        self._column: tuple[pa.Array, Callable[[str], str], int, npt.NDArray[np.int32]] | None = None
        """Names that a column had last, how they were renamed, how many were known then, and the codes."""

    def read_codes(self, column: pa.ChunkedArray, rename: Callable[[str], str]) -> npt.NDArray[np.int32]:
        """A column of names as codes; those of names that none of the lists has are above all others.

        Args:
            column: of a file.
            rename: the name in the history of a name in the file.
        """
        pieces = [np.empty(0, np.int32)]
        for chunk in column.chunks:
            known = self._column
            if known is None or known[1:3] != (rename, len(self.code_of)) or not known[0].equals(chunk.dictionary):
                codes = encode_texts(chunk.dictionary, dict(self.code_of), rename)
                known = self._column = chunk.dictionary, rename, len(self.code_of), codes
            pieces.append(known[3][view_numbers(chunk.indices)])
        return np.concatenate(pieces)

    def read(self, text: bytes, rank: int, rename: Callable[[str], str], groups: int) -> PartSites:
        """What a file tells of its sites.

        Args:
            text: of its metadata.
            rank: whose file it is.
            rename: the name in the history of a name in the file.
            groups: how many row groups the file has.

        Raises:
            ValueError: it is something else.
        """
        found = self._read.get((rank, text))
        if found is None:
            found = self._read[rank, text] = self._parse(text, rename, groups)
        return found

    def _parse(self, text: bytes, rename: Callable[[str], str], groups: int) -> PartSites:
        told = _unpack(text)
        if not len(told["names"]) == len(told["orders"]) or len(told["groups"]) != groups:
            raise ValueError(f"{SITES.decode()!r} of its metadata lists other rows")
        n = len(told["names"])
        order = _to_integers(told["orders"])
        is_present = np.full(n, told["present"] is None)
        is_present[_check_places(told["present"] or [], n)] = True
        return renumber(
            [rename(name) for name in told["names"]],
            PartSites(
                np.flatnonzero(is_present).astype(np.int32),
                np.where(order < 0, NO_ORDER, order)[is_present],
                {at: _check_places(places, n) for at, places in enumerate(told["groups"]) if places is not None},
            ),
            self.code_of,
        )


def renumber(names: list[str], sites: PartSites, code_of: dict[str, int]) -> PartSites:
    """Sites of a part by other numbers.

    Args:
        names: theirs, and those of sites without rows.
        sites: by their places among these names.
        code_of: the numbers of names, to which these are added.
    """
    codes = np.array([code_of.setdefault(name, len(code_of)) for name in names], np.int32)
    found, groups = np.unique(codes[sites.codes], return_inverse=True)
    orders = np.full(len(found), NO_ORDER)
    np.minimum.at(orders, groups, sites.orders)
    return PartSites(found, orders, {number: np.unique(codes[places]) for number, places in sites.of_groups.items()})


def _check_places(places: list[int], n: int) -> npt.NDArray[np.int32]:
    found = _to_integers(places)
    if len(found) and not (found.min() >= 0 and found.max() < n):
        raise ValueError(f"{SITES.decode()!r} of its metadata speaks of sites that it does not name")
    return found.astype(np.int32)


def _to_integers(listed: list[Any]) -> IntArray:
    try:
        return np.array(listed, np.int64)
    except OverflowError as error:
        raise ValueError(f"its metadata holds a number that is too large: {error}") from None


def _unpack(text: bytes) -> dict[str, Any]:
    unpacker = zlib.decompressobj()
    try:
        content = unpacker.decompress(base64.b64decode(text, validate=True), _LARGEST)
    except zlib.error as error:
        raise ValueError(f"{SITES.decode()!r} of its metadata cannot be unpacked: {error}") from None
    if unpacker.unconsumed_tail:
        raise ValueError(f"{SITES.decode()!r} of its metadata unpacks to more than {_LARGEST} bytes")
    told = parse_object(content)
    kinds = {"names": list[str], "orders": list[int], "groups": list[list[int] | None], "present": list[int] | None}
    check_kinds({**dict.fromkeys(kinds, 0), **told}, kinds)
    return told
