"""An inventory as a table: saved tensors by module, by kind of node, or one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, TextIO, get_args

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from retrograd.core.amounts import count_of, show_bytes
from retrograd.core.errors import SavedTensorError
from retrograd.core.sites.pattern import translate_glob
from retrograd.core.views.terminal import giving_text, make_table, open_console, print_name, print_share
from retrograd.following.graph.node import Line, shorten_line
from retrograd.memory.inventory.inventory import Inventory, locate_peak, print_entry
from retrograd.memory.inventory.timeline import PERMANENT

By = Literal["module", "node", "tensor"]

_NO_MODULE = "(no module)"

_SPARED = ("share", "asked")
"""Columns that are left out first where there is little room."""

_UNBOUNDED = 10_000
"""A width in which every table fits."""

Row = dict[str, Any]


def print_inventory(
    inventory: Inventory,
    *,
    by: By = "module",
    modules: str | None = None,
    limit: int | None = 20,
    file: TextIO | None = None,
) -> None:
    """Print saved tensors, largest first, and those alive when most is held.

    Memory that several nodes save counts where it was saved first. Parameters and buffers do not count: they are in
    memory anyway. A share is relative to all saved memory; ``at peak`` is the part held when most is; ``made in`` is
    the time of the operation that computed a tensor, and perhaps others. Narrow terminals show fewer columns.

    Args:
        inventory: as made by ``rg.take_inventory()``, or loaded.
        by: grouping of lines: ``module``, ``node`` (its kind) or ``tensor``.
        modules: a glob; only modules that match it.
        limit: number of lines; None for all.
        file: where to print; standard output when left out.

    Raises:
        SavedTensorError: for an unknown grouping, or a pattern that fits no module.
    """
    if by not in get_args(By):
        raise SavedTensorError(f"by={by!r} is not known.", repair=f"give one of {', '.join(get_args(By))}.")
    rows = _choose(inventory, modules)
    console = open_console(file)
    console.print(_describe(inventory, rows), style="dim")
    if rows:
        lines = _list_tensors(rows) if by == "tensor" else _group(rows, inventory, by)
        console.print(_make_fitting_table(console, lines[:limit], by, inventory.resident))
        if limit is not None and len(lines) > limit:
            console.print(f"and {len(lines) - limit:,} more", style="dim")
        if inventory.peak.bytes:
            console.print(Text(print_name(console, f"peak: {locate_peak(inventory)}")), style="bold")
    for note in inventory.notes:
        console.print(Text(print_name(console, note)), style="yellow")


format_inventory = giving_text(print_inventory)


def _choose(inventory: Inventory, pattern: str | None) -> list[Row]:
    rows = [row for row in inventory.table.to_pylist() if row["kind"] not in PERMANENT]
    if pattern is None:
        return rows
    chosen = [row for row in rows if row["module"] is not None and translate_glob(pattern)(row["module"])]
    if rows and not chosen:
        names = list(dict.fromkeys(row["module"] or _NO_MODULE for row in rows))
        raise SavedTensorError(
            f"The pattern {pattern!r} matches no module that saves tensors.",
            repair=f"the largest are {', '.join(names[:5])}.",
        )
    return chosen


def _describe(inventory: Inventory, chosen: Sequence[Row]) -> str:
    if not inventory.passes:
        return "no backward pass was recorded"
    passes = count_of(inventory.passes, "backward pass", "backward passes")
    resident, asked = (sum(row[name] for row in chosen) for name in ("resident", "asked"))
    whole = f" of {show_bytes(inventory.resident)}" if resident != inventory.resident else ""
    return (
        f"{passes}: {count_of(len(chosen), 'tensor')} saved besides parameters and buffers, "
        f"{show_bytes(resident)}{whole} ({show_bytes(asked)} if none shared memory)"
    )


class _Share:
    """Some rows together; sizes in bytes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sizes: Counter[str] = Counter()
        self.count = 0
        self.recomputed_by: Counter[str] = Counter()
        self.line = ""
        self.seconds: float | None = None

    def add(self, row: Row, at_peak: int) -> None:
        self.count += 1
        self.sizes.update(resident=row["resident"], asked=row["asked"], at_peak=at_peak)
        self.recomputed_by[row["remake"] or ""] += row["resident"]

    @property
    def remake(self) -> str:
        """The operation that would recompute most of it; empty if none is known."""
        return max(self.recomputed_by, key=self.recomputed_by.__getitem__, default="")


def _group(rows: Sequence[Row], inventory: Inventory, by: By) -> list[_Share]:
    name_of: Callable[[Row], str] = _module_of if by == "module" else _node_of
    at_peak = _bytes_at_peak(inventory)
    lines: dict[str, _Share] = {}
    for row in rows:
        name = name_of(row)
        lines.setdefault(name, _Share(name)).add(row, at_peak.get(row["entry"], 0))
    return _sort(lines.values())


def _list_tensors(rows: Sequence[Row]) -> list[_Share]:
    lines = []
    for row in rows:
        line = _Share(print_entry(row))
        line.add(row, 0)
        line.seconds = row["seconds"]
        if row["file"] is not None:
            line.line = shorten_line(Line(row["file"], row["line"], row["function"], row["operation"] or ""))
        lines.append(line)
    return _sort(lines)


def _sort(lines: Any) -> list[_Share]:
    return sorted(lines, key=lambda line: (-line.sizes["resident"], -line.sizes["asked"]))


def _bytes_at_peak(inventory: Inventory) -> Counter[int]:
    alive = set(inventory.peak.entries)
    sizes: Counter[int] = Counter()
    for storage in inventory.storages:
        if any(saver.entry in alive for saver in storage.savers):
            sizes[storage.savers[0].entry] += storage.bytes
    return sizes


def _module_of(row: Row) -> str:
    return row["module"] if row["module"] is not None else _NO_MODULE


def _node_of(row: Row) -> str:
    return str(row["node"])


def _make_fitting_table(console: Console, lines: Sequence[_Share], by: By, total: int) -> Table:
    titles = ["resident", "share", "asked"] if by == "tensor" else ["tensors", "resident", "share", "asked", "at peak"]
    if any(line.seconds is not None for line in lines):
        titles.append("made in")
    table = _tabulate(console, lines, by, titles, total)
    if Measurement.get(console, console.options.update_width(_UNBOUNDED), table).maximum <= console.width:
        return table
    return _tabulate(console, lines, by, [title for title in titles if title not in _SPARED], total)


def _tabulate(console: Console, lines: Sequence[_Share], by: By, titles: Sequence[str], total: int) -> Table:
    last = {"line": "text"} if by == "tensor" else {}
    rows = []
    for line in lines:
        values = {
            "tensors": f"{line.count:,}",
            "resident": show_bytes(line.sizes["resident"]),
            "share": print_share(line.sizes["resident"] / total if total else 0.0),
            "asked": show_bytes(line.sizes["asked"]),
            "at peak": show_bytes(line.sizes["at_peak"]),
            "made in": "" if line.seconds is None else f"{1000 * line.seconds:,.3f} ms",
        }
        cells = [line.name, *(values[title] for title in titles), line.remake]
        if by == "tensor":
            cells.append(line.line)
        rows.append(cells)
    return make_table(console, {by: "name", **dict.fromkeys(titles, "number"), "recomputed by": "name", **last}, rows)
