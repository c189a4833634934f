"""An inventory as plain text: what ``print`` shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol

import pyarrow as pa

from retrograd.graph.node import name_place
from retrograd.saved.held import Peak, Timeline
from retrograd.saved.inventory_columns import PERMANENT

_MOST_MODULES = 12
_MOST_TENSORS = 8
_UNITS = ("B", "kB", "MB", "GB", "TB")


class Described(Protocol):
    """What an inventory says of itself."""

    table: pa.Table
    passes: int
    positions: int
    notes: tuple[str, ...]

    @property
    def resident(self) -> int: ...
    @property
    def asked(self) -> int: ...
    @property
    def peak(self) -> Peak: ...
    @property
    def timeline(self) -> Timeline: ...
    def by_module(self) -> pa.Table: ...


def print_size(count: float) -> str:
    """Bytes in three digits, in units of thousands: ``45.4 GB``."""
    unit = 0
    while count >= 999.5 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 or count >= 100 else f"{count:.3g} {_UNITS[unit]}"


def print_place(row: dict[str, Any]) -> str:
    """The node that keeps a tensor: ``blocks.3.fc#2:AddmmBackward0``."""
    return name_place(row["node"], row["module"], row["call"] or 1, None)


def print_entry(row: dict[str, Any]) -> str:
    """One saved tensor in words: ``blocks.3.fc:AddmmBackward0 mat1 float32[8, 64]``."""
    shape = "" if row["shape"] is None else f"[{', '.join(map(str, row['shape']))}]"
    return f"{print_place(row)} {row['slot']} {row['dtype'] or '(never there)'}{shape}"


def describe_inventory(inventory: Described) -> str:
    """By module what is kept, largest first, the total, and what is alive at the peak."""
    return "\n".join(_lines(inventory))


def _lines(inventory: Described) -> Iterator[str]:
    if not inventory.passes:
        yield "No backward pass was seen, so nothing is known of what autograd keeps."
        yield from inventory.notes
        return
    counts = Counter(inventory.table["kind"].to_pylist())
    permanent = sum(counts[kind] for kind in PERMANENT)
    yield (
        f"{counts.total() - permanent:,} saved tensors keep {print_size(inventory.resident)}; copies of them would "
        f"take {print_size(inventory.asked)}. {permanent:,} more are parameters and buffers, which are there anyway."
    )
    rows = inventory.by_module().to_pylist()
    width = max([len(row["module"] or "(no module)") for row in rows[:_MOST_MODULES]], default=6)
    yield f"{'module':<{width}}  {'tensors':>8}  {'resident':>9}  {'asked':>9}  {'at peak':>9}"
    for row in rows[:_MOST_MODULES]:
        sizes = "  ".join(f"{print_size(row[name]):>9}" for name in ("resident", "asked", "at_peak"))
        yield f"{row['module'] or '(no module)':<{width}}  {row['tensors']:>8,}  {sizes}"
    if len(rows) > _MOST_MODULES:
        yield f"and {len(rows) - _MOST_MODULES:,} more modules"
    yield from _tell_peak(inventory)
    yield from inventory.notes


def _tell_peak(inventory: Described) -> Iterator[str]:
    peak, timeline = inventory.peak, inventory.timeline
    if not peak.bytes:
        return
    at = int(timeline.entry[peak.position])
    what = "runs" if timeline.runs[peak.position] else "is made"
    where = f"while {print_place(_row(inventory, at))} {what}" if at >= 0 else "at the end"
    yield f"Peak: {print_size(peak.bytes)} at position {peak.position:,} of {inventory.positions - 1:,}, {where}."
    largest = [entry for entry in peak.entries if _row(inventory, entry)["resident"]][:_MOST_TENSORS]
    for entry in largest:
        row = _row(inventory, entry)
        yield f"  {print_size(row['resident']):>9}  {print_entry(row)}"
    if len(peak.entries) > len(largest):
        yield f"  and {len(peak.entries) - len(largest):,} more that are alive then"


def _row(inventory: Described, entry: int) -> dict[str, Any]:
    row: dict[str, Any] = inventory.table.slice(entry, 1).to_pylist()[0]
    return row
