"""The inventory: every tensor that autograd keeps between forward and backward, as plain data."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from retrograd.core.amounts import count_of, show_bytes
from retrograd.core.drawings import drawn_by
from retrograd.core.errors import SavedTensorError
from retrograd.core.files import write_file
from retrograd.core.foreign.tables import read_table
from retrograd.core.foreign.text import check_kinds, parse_object, show_plainly
from retrograd.core.notices import warnings_kept
from retrograd.following.graph.node import name_place
from retrograd.memory.inventory.timeline import (
    PERMANENT,
    SCHEMA,
    HeldStorage,
    Peak,
    Timeline,
    is_held,
    list_storages,
    make_timeline,
)

_MOST_MODULES = 12
_MOST_TENSORS = 8
"""So many are shown of each."""


_NEEDED = ("entry", "node", "slot", "held", "kind", "asked", "resident", "storages", "storage_bytes", "unpacked")
_MOST_POSITIONS = 10_000_000
"""Of one step: each is an entry of arrays."""

_KEY = b"retrograd.inventory"


class Inventory:
    """Every tensor that autograd keeps: where, how large, since when and until when, and how it could be recomputed.

    It holds no tensor and no graph. ``print(inventory)`` says by module what is held, and what is alive at the peak.

    Attributes:
        table: one row for each tensor that a node keeps; its columns are explained in ``docs/saved_tensors.md``.
        passes: how many backward passes were followed.
        positions: how many positions there are, see :class:`Timeline`.
        modules: seconds that calls of each module took in the forward, those of modules within it included.
        notes: what is not in it, and why, in words.
    """

    @warnings_kept()  # for the first table pyarrow loads pandas
    def __init__(
        self,
        table: pa.Table | None = None,
        *,
        passes: int = 0,
        modules: dict[str, float] | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._fill(table if table is not None else SCHEMA.empty_table(), passes, modules or {}, notes)

    def _fill(self, table: pa.Table, passes: int, modules: dict[str, float], notes: tuple[str, ...]) -> None:
        for name in ("storages", "timeline", "peak"):
            self.__dict__.pop(name, None)
        self.table = table
        self.passes = passes
        self.modules = modules
        self.notes = notes
        self.positions = _count_positions(table)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __repr__(self) -> str:
        return f"<Inventory of {count_of(len(self), 'saved tensor')}, {count_of(self.resident, 'byte')}>"

    def __str__(self) -> str:
        return show_plainly("\n".join(_describe(self)))

    _repr_html_ = drawn_by("retrograd.memory.views.notebook", "draw_inventory")

    @property
    def resident(self) -> int:
        """Bytes of memory that are there because autograd keeps them, each piece once, over all positions."""
        return pc.sum(self.table["resident"]).as_py() or 0

    @property
    def asked(self) -> int:
        """Bytes that copies of all of these tensors would take, without parameters and buffers."""
        is_permanent = pc.is_in(self.table["kind"], pa.array(PERMANENT))
        return pc.sum(self.table.filter(pc.invert(is_permanent))["asked"]).as_py() or 0

    @cached_property
    def storages(self) -> tuple[HeldStorage, ...]:
        """Each piece of memory with all that save it, largest first; parameters and buffers are not among them."""
        return list_storages(self.table, self.positions)

    @cached_property
    def timeline(self) -> Timeline:
        """Bytes held at each position of forward and backward."""
        return make_timeline(self.table, self.storages, self.positions)

    @cached_property
    def peak(self) -> Peak:
        """The position at which most is held, and what."""
        held = self.timeline.held
        if not held.any():
            return Peak(0, 0, ())
        position = int(np.argmax(held))
        alive = [storage for storage in self.storages if is_held(storage, position, self.positions)]
        entries = dict.fromkeys(
            saver.entry
            for storage in alive
            for saver in storage.savers
            if saver.packed <= position and (saver.released is None or position <= saver.released)
        )
        return Peak(position, int(held[position]), tuple(entries))

    def by_module(self) -> pa.Table:
        """Each module with the number of tensors it keeps, bytes asked for, resident and at the peak, and its seconds.

        Largest first. A piece of memory counts for the module that saved it first; its columns are ``module``
        (null outside of all), ``tensors``, ``asked``, ``resident``, ``at_peak`` and ``seconds``.
        """
        at_peak = {
            storage.savers[0].entry: storage.bytes
            for storage in self.storages
            if is_held(storage, self.peak.position, self.positions)
        }
        sums: dict[str | None, list[int]] = {}
        columns = ("entry", "module", "kind", "asked", "resident")
        for entry, module, kind, asked, resident in zip(*(self.table[c].to_pylist() for c in columns), strict=True):
            if kind in PERMANENT:
                continue
            total = sums.setdefault(module, [0, 0, 0, 0])
            for place, value in enumerate((1, asked, resident, at_peak.get(entry, 0))):
                total[place] += value
        rows = sorted(sums.items(), key=lambda item: -item[1][2])
        names = ("tensors", "asked", "resident", "at_peak")
        return pa.table(
            {
                "module": pa.array([module for module, _ in rows], pa.string()),
                **{name: pa.array([row[n] for _, row in rows], pa.int64()) for n, name in enumerate(names)},
                "seconds": pa.array([self.modules.get(module or "") for module, _ in rows], pa.float64()),
            }
        )

    def shared_with(self, entry: int) -> list[int]:
        """Numbers of the other rows that keep the same memory as this one, or a part of it."""
        numbers, pieces = (self.table[name].to_pylist() for name in ("entry", "storages"))
        kept = dict(zip(numbers, pieces, strict=True))
        return [other for other in kept if other != entry and not set(kept[entry]).isdisjoint(kept[other])]

    def on(self, device: str) -> Inventory:
        """The part of it that lies on one device, as in ``"cuda:0"``; rows and positions keep their numbers."""
        part = Inventory(passes=self.passes, modules=self.modules, notes=self.notes)
        part.table = self.table.filter(pc.equal(self.table["device"], device))
        part.positions = self.positions
        return part

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as a Parquet file, one row a saved tensor; returns its path."""
        with write_file(path) as file:
            self.write(file)
        return Path(path)

    def write(self, file: BinaryIO) -> None:
        """Write what :meth:`save` writes to a file that is open."""
        facts = {"passes": self.passes, "modules": self.modules, "notes": self.notes}
        table = self.table.replace_schema_metadata({_KEY: json.dumps(facts)})
        pq.write_table(table, file, compression="zstd")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Inventory:
        """Read one that was saved.

        Raises:
            SavedTensorError: the file holds no inventory, or is damaged.
        """
        try:
            table = read_table(path)
            facts = parse_object((table.schema.metadata or {})[_KEY])
            check_kinds(facts, {"passes": int, "modules": dict[str, float], "notes": list[str]})
            table = table.select(SCHEMA.names).cast(SCHEMA)
            _check_rows(table)
            inventory = cls(table, passes=facts["passes"], modules=facts["modules"], notes=tuple(facts["notes"]))
            assert inventory.peak is not None  # takes the rows together, so it finds those that do not fit
        except (
            *(pa.ArrowException, OSError, ValueError, KeyError),
            *(TypeError, AttributeError, IndexError, OverflowError, AssertionError),
        ) as error:
            raise SavedTensorError(
                f"{str(path)!r} holds no inventory that can be read: {error}",
                repair="give a file that Inventory.save() has written.",
            ) from error
        return inventory


def _check_rows(table: pa.Table) -> None:
    """Check that every row tells what no row may leave out, and that no number in it is beyond all measure.

    Raises:
        ValueError: one does not.
    """
    for name in _NEEDED:
        if table[name].null_count:
            raise ValueError(f"a row has no {name!r}")
    for name in ("packed", "released", "asked", "resident", "unpacked", "storage_bytes", "storages"):
        column = table[name]
        limits = pc.min_max(pc.list_flatten(column) if pa.types.is_list(column.type) else column).as_py()
        least, most = limits["min"] or 0, limits["max"] or 0
        if least < 0 or most > (_MOST_POSITIONS if name in {"packed", "released", "unpacked"} else 1 << 62):
            raise ValueError(f"{name!r} cannot be {least if least < 0 else most}")


def _count_positions(table: pa.Table) -> int:
    """Count a position for each event, and one for the end."""
    packed = [position for position in table["packed"].to_pylist() if position is not None]
    unpacked = [position for positions in table["unpacked"].to_pylist() for position in positions]
    return max([*packed, *unpacked], default=-1) + 2


def print_place(row: dict[str, Any]) -> str:
    """Print the node that keeps a tensor: ``blocks.3.fc#2:AddmmBackward0``."""
    return name_place(row["node"], row["module"], row["call"] or 1, None)


def print_entry(row: dict[str, Any]) -> str:
    """Print a saved tensor in words: ``blocks.3.fc:AddmmBackward0 mat1 float32[8, 64]``."""
    shape = "" if row["shape"] is None else f"[{', '.join(map(str, row['shape']))}]"
    return f"{print_place(row)} {row['slot']} {row['dtype'] or '(never there)'}{shape}"


def _describe(inventory: Inventory) -> Iterator[str]:
    """Lines of text: the total, by module what is kept, largest first, and what is alive at the peak."""
    if not inventory.passes:
        yield "No backward pass was seen, so nothing is known of what autograd keeps."
        yield from inventory.notes
        return
    counts = Counter(inventory.table["kind"].to_pylist())
    permanent = sum(counts[kind] for kind in PERMANENT)
    yield f"{_describe_kept(inventory, counts.total() - permanent)}{_describe_permanent(permanent)}"
    yield from _describe_modules(inventory.by_module().to_pylist())
    yield from _describe_peak(inventory)
    yield from inventory.notes


def _describe_kept(inventory: Inventory, count: int) -> str:
    size, copies = show_bytes(inventory.resident), show_bytes(inventory.asked)
    if count == 1:
        return f"1 saved tensor keeps {size}; a copy of it would take {copies}."
    return f"{count:,} saved tensors keep {size}; copies of them would take {copies}."


def _describe_permanent(count: int) -> str:
    if count == 1:
        return " 1 more is a parameter or buffer, which is there anyway."
    return f" {count:,} more are parameters and buffers, which are there anyway." if count else ""


def _describe_modules(rows: list[dict[str, Any]]) -> Iterator[str]:
    if not rows:
        return
    width = max(len(row["module"] or "(no module)") for row in rows[:_MOST_MODULES])
    yield f"{'module':<{width}}  {'tensors':>8}  {'resident':>9}  {'asked':>9}  {'at peak':>9}"
    for row in rows[:_MOST_MODULES]:
        sizes = "  ".join(f"{show_bytes(row[name]):>9}" for name in ("resident", "asked", "at_peak"))
        yield f"{row['module'] or '(no module)':<{width}}  {row['tensors']:>8,}  {sizes}"
    if len(rows) > _MOST_MODULES:
        yield f"and {len(rows) - _MOST_MODULES:,} more modules"


def locate_peak(inventory: Inventory) -> str:
    """How much is held at the peak, and when: at which position, and what the forward or the backward does there."""
    peak, timeline = inventory.peak, inventory.timeline
    rows = {row["entry"]: row for row in inventory.table.to_pylist()}  # of a part, not those from 0 on
    at = int(timeline.entry[peak.position])
    what = "backward runs" if timeline.runs[peak.position] else "forward creates"
    where = f"when the {what} {print_place(rows[at])}" if at >= 0 else "at the end"
    return f"{show_bytes(peak.bytes)} at position {peak.position:,} of {inventory.positions - 1:,}, {where}"


def _describe_peak(inventory: Inventory) -> Iterator[str]:
    peak = inventory.peak
    if not peak.bytes:
        return
    rows = {row["entry"]: row for row in inventory.table.to_pylist()}
    yield f"Peak: {locate_peak(inventory)}."
    largest = [rows[entry] for entry in peak.entries if rows[entry]["resident"]][:_MOST_TENSORS]
    for row in largest:
        yield f"  {show_bytes(row['resident']):>9}  {print_entry(row)}"
    rest = len(peak.entries) - len(largest)
    if rest:
        yield f"  and {rest:,} more that {'is' if rest == 1 else 'are'} alive then"
