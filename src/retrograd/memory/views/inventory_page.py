"""An inventory as one HTML file: bytes held over forward and backward, and by module."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from retrograd.core.amounts import count_of, show_bytes
from retrograd.core.errors import SavedTensorError
from retrograd.core.views.page.frame import frame_page, pack_json, write_page
from retrograd.following.graph.node import Line, shorten_line
from retrograd.following.graph.plain_names import name_saved_plainly
from retrograd.memory.inventory.inventory import Inventory, print_place
from retrograd.memory.inventory.timeline import HeldStorage, spans_of


def write_inventory(
    inventory: Inventory, path: str | os.PathLike[str] = "inventory.html", *, title: str = "Saved tensors"
) -> Path:
    """Write an inventory as one HTML file that opens offline.

    It shows the bytes held over forward and backward with the peak named, a treemap by module of the tensors alive at
    the chosen position, and every such tensor with its details.

    Args:
        inventory: as made by ``rg.take_inventory()``, or loaded.
        path: the file.
        title: the heading.

    Returns:
        The path.

    Raises:
        SavedTensorError: the file cannot be written.
    """
    return write_page(path, build_page(inventory, title), "The inventory", SavedTensorError)


def build_page(inventory: Inventory, title: str = "Saved tensors") -> str:
    """Build the page as text. Texts of the inventory are escaped: they can be neither markup nor script."""
    facts = describe_inventory(inventory)
    return frame_page(
        "retrograd.memory.views.inventory_assets",
        title,
        {"inventory": facts},
        {"inventory": pack_inventory(inventory)},
        parts={"kept": "retrograd.core.views.kept"},
        words={"about": facts["about"]},
    )


def make_block(found: Inventory | Path) -> tuple[dict[str, Any], str]:
    """Make the part of a report that shows an inventory, or the file of one: its facts, and its packed entries.

    Raises:
        SavedTensorError: the file is damaged.
    """
    inventory = Inventory.load(found) if isinstance(found, Path) else found
    return describe_inventory(inventory), pack_inventory(inventory)


_COLUMNS = (
    "module", "place", "slot", "plain", "kind", "held", "name", "info", "line", "source", "maker", "remake", "group",
    "asked", "sharers", "packed", "released", "runs", "seconds",
)  # fmt: skip

GROUPS = ("cheap", "dear", "input", "cast", "other")
"""Meanings of the colours of the page."""


def describe_inventory(inventory: Inventory) -> dict[str, Any]:
    """Facts that the scripts read when the page opens."""
    return {
        "peak": inventory.peak.position,
        "notes": list(inventory.notes),
        "passes": inventory.passes,
        "about": summarize_inventory(inventory),
    }


def summarize_inventory(inventory: Inventory) -> str:
    """One line of text."""
    if not inventory.passes:
        return "No backward pass was recorded."
    storages = count_of(len(inventory.storages), "storage")
    return (
        f"{storages} saved, {show_bytes(inventory.resident)} ({show_bytes(inventory.asked)} if no tensors shared "
        f"memory). Peak: {show_bytes(inventory.peak.bytes)}."
    )


def pack_inventory(inventory: Inventory) -> str:
    """The block of the page: columns of those rows that keep memory, the memory itself, and the timeline."""
    texts = _Texts()
    storages = [storage for storage in inventory.storages if storage.bytes]
    wanted = {saver.entry for storage in storages for saver in storage.savers}
    everything = inventory.table.to_pylist()
    rows = [row for row in everything if row["entry"] in wanted]
    names = {row["entry"]: print_place(row) for row in everything}
    places = {row["entry"]: place for place, row in enumerate(rows)}
    described = [_describe(row, texts) for row in rows]
    timeline = inventory.timeline
    written = {
        "rows": {name: [each[name] for each in described] for name in _COLUMNS},
        "storages": [_write_storage(storage, places, inventory.positions) for storage in storages],
        "held": timeline.held.tolist(),
        "seconds": [None if math.isnan(value) else round(value, 6) for value in timeline.seconds.tolist()],
        "isRun": timeline.runs.astype(int).tolist(),
        "at": [texts.number(names.get(entry, "")) for entry in timeline.entry.tolist()],
        "texts": texts.all,
    }
    return pack_json(written)


class _Texts:
    """Texts by number, each once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str | None) -> int:
        return self._numbers.setdefault(text or "", len(self._numbers))

    @property
    def all(self) -> list[str]:
        return list(self._numbers)


def _describe(row: dict[str, Any], texts: _Texts) -> dict[str, Any]:
    shape = "" if row["shape"] is None else f"[{', '.join(map(str, row['shape']))}]"
    device = "" if row["device"] in (None, "cpu") else f" on {row['device']}"
    line = None
    if row["file"] is not None:
        line = Line(row["file"], row["line"], row["function"], row["operation"] or "")
    return {
        "module": texts.number(row["module"]),
        "place": texts.number(print_place(row)),
        "slot": texts.number(row["slot"]),
        "plain": texts.number(name_saved_plainly(row["node"] or "", row["slot"] or "")),
        "kind": texts.number(row["kind"]),
        "held": texts.number(row["held"]),
        "name": texts.number(row["name"]),
        "info": texts.number(f"{row['dtype']}{shape}{device}"),
        "line": texts.number(shorten_line(line)),
        "source": texts.number(str(line) if line is not None else ""),
        "maker": texts.number(row["maker"]),
        "remake": texts.number(row["remake"]),
        "group": _group_of(row),
        "asked": row["asked"],
        "sharers": row["sharers"],
        "packed": row["packed"],
        "released": -1 if row["released"] is None else row["released"],
        "runs": row["unpacked"],
        "seconds": row["seconds"],
    }


def _group_of(row: dict[str, Any]) -> int:
    if row["kind"] in ("input", "cast"):
        return GROUPS.index(row["kind"])
    if row["price"] in ("free", "cheap"):
        return GROUPS.index("cheap")
    return GROUPS.index("dear" if row["price"] == "dear" else "other")


def _write_storage(storage: HeldStorage, places: dict[int, int], positions: int) -> list[Any]:
    """Bytes, rows of its savers, and first positions and those after the last of the spans in which it is held."""
    spans = spans_of(storage.savers, positions)
    return [storage.bytes, [places[saver.entry] for saver in storage.savers], [p for span in spans for p in span]]
