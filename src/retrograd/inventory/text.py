"""An inventory as plain text: what ``print`` shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol

import pyarrow as pa

from retrograd.amounts import show_bytes
from retrograd.graph.node import name_place
from retrograd.inventory.columns import PERMANENT
from retrograd.inventory.timeline import Peak, Timeline

_MOST_MODULES = 12
_MOST_TENSORS = 8


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
    yield f"{_tell_kept(inventory, counts.total() - permanent)}{_tell_permanent(permanent)}"
    yield from _tell_modules(inventory.by_module().to_pylist())
    yield from _tell_peak(inventory)
    yield from inventory.notes


def _tell_kept(inventory: Described, count: int) -> str:
    size, copies = show_bytes(inventory.resident), show_bytes(inventory.asked)
    if count == 1:
        return f"1 saved tensor keeps {size}; a copy of it would take {copies}."
    return f"{count:,} saved tensors keep {size}; copies of them would take {copies}."


def _tell_permanent(count: int) -> str:
    if count == 1:
        return " 1 more is a parameter or buffer, which is there anyway."
    return f" {count:,} more are parameters and buffers, which are there anyway." if count else ""


def _tell_modules(rows: list[dict[str, Any]]) -> Iterator[str]:
    if not rows:
        return
    width = max(len(row["module"] or "(no module)") for row in rows[:_MOST_MODULES])
    yield f"{'module':<{width}}  {'tensors':>8}  {'resident':>9}  {'asked':>9}  {'at peak':>9}"
    for row in rows[:_MOST_MODULES]:
        sizes = "  ".join(f"{show_bytes(row[name]):>9}" for name in ("resident", "asked", "at_peak"))
        yield f"{row['module'] or '(no module)':<{width}}  {row['tensors']:>8,}  {sizes}"
    if len(rows) > _MOST_MODULES:
        yield f"and {len(rows) - _MOST_MODULES:,} more modules"


def _tell_peak(inventory: Described) -> Iterator[str]:
    peak, timeline = inventory.peak, inventory.timeline
    if not peak.bytes:
        return
    rows = {row["entry"]: row for row in inventory.table.to_pylist()}  # of a part, not those from 0 on
    at = int(timeline.entry[peak.position])
    what = "runs" if timeline.runs[peak.position] else "is made"
    where = f"while {print_place(rows[at])} {what}" if at >= 0 else "at the end"
    yield f"Peak: {show_bytes(peak.bytes)} at position {peak.position:,} of {inventory.positions - 1:,}, {where}."
    largest = [rows[entry] for entry in peak.entries if rows[entry]["resident"]][:_MOST_TENSORS]
    for row in largest:
        yield f"  {show_bytes(row['resident']):>9}  {print_entry(row)}"
    rest = len(peak.entries) - len(largest)
    if rest:
        yield f"  and {rest:,} more that {'is' if rest == 1 else 'are'} alive then"
