"""The rows of an inventory, made of what was noted while a program ran."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Any

import pyarrow as pa

from retrograd.core.files import make_all_storable
from retrograd.core.hooks.forward_log import OperationClock
from retrograd.following.graph.node import Line
from retrograd.following.graph.origin import Origin
from retrograd.following.graph.origins import Origins
from retrograd.memory.inventory.costs import find_cost_of_saved
from retrograd.memory.inventory.notes import NodeNotes, SlotNotes, TensorNotes
from retrograd.memory.inventory.timeline import PERMANENT, SCHEMA
from retrograd.memory.inventory.watch import InventoryWatch

_NOWHERE = Origin()

Row = dict[str, Any]

Columns = dict[str, list[Any]]
"""Filled side by side: as many dicts as there are rows would wake the garbage collector."""

_ATTRIBUTED = ("entry", "resident", "first_saver", "sharers")
"""Columns that are known when all rows are."""

_UNKNOWN: Row = {"kind": "unknown", "name": "", "asked": 0, "storages": (), "storage_bytes": ()}
"""A tensor that was never there."""


def make_table(watch: InventoryWatch, origins: Origins, clock: OperationClock | None, thread: int) -> pa.Table:
    """The table of an inventory.

    Args:
        watch: what was seen.
        origins: where nodes were made.
        clock: how long that took; None where it was not measured.
        thread: number of the thread that the clock has listened to.
    """
    times = _CreationTimes(watch, list(_list_times(origins, clock, thread)))
    order = _EventOrder(watch.nodes, times)
    ends = _find_ends_of_checkpoints(watch.nodes, order)
    columns: Columns = {name: [] for name in SCHEMA.names}
    filled = [(name, column.append) for name, column in columns.items() if name not in _ATTRIBUTED]
    for node in sorted(watch.nodes, key=order.made):
        origin = origins.find(node.number) or _NOWHERE
        shared = _describe_node(node, origin) | _describe_runs(node, order, watch.begin)
        for slot in node.slots:
            row = {
                **shared,
                "slot": slot.slot,
                "held": slot.held,
                **(_UNKNOWN if slot.tensor is None else slot.tensor._asdict()),
                **_describe_life(node, slot, order, ends, watch.begin),
                **_describe_making(slot.tensor, origin.line, clock),
            }
            for name, append in filled:
                append(row.get(name))
    _attribute_memory(columns)
    return pa.Table.from_pydict({name: make_all_storable(column) for name, column in columns.items()}, schema=SCHEMA)


def _list_times(origins: Origins, clock: OperationClock | None, thread: int) -> Iterator[tuple[int, int, int]]:
    """Thread, number and a time at which all nodes of smaller numbers had been made."""
    for span in origins.spans:
        yield span.thread, span.first, span.begin
        yield span.thread, span.last, span.end
    for number, when in clock.ends if clock is not None else ():
        yield thread, number, when


class _CreationTimes:
    """Times at which nodes were made: the first time at which all nodes up to theirs were known to be there."""

    def __init__(self, watch: InventoryWatch, times: Iterable[tuple[int, int, int]]) -> None:
        known: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for each, number, when in (*times, *watch.clock):
            known[each].append((number, when))
        self._numbers: dict[int, list[int]] = {}
        self._times: dict[int, list[int]] = {}
        for each, pairs in known.items():
            pairs.sort(key=lambda pair: pair[1])
            self._numbers[each] = _never_falling([number for number, _ in pairs])
            self._times[each] = [when for _, when in pairs]

    def made(self, node: NodeNotes) -> int:
        """The time at which a node was made, or a little later."""
        numbers = self._numbers.get(node.thread, [])
        place = bisect_right(numbers, node.number)
        return min(self._times[node.thread][place], node.seen) if place < len(numbers) else node.seen


_MADE = -1
"""Beside the numbers of runs: it is made."""


class _EventOrder:
    """Positions of events: a node that keeps something is made, or it runs."""

    def __init__(self, nodes: Sequence[NodeNotes], times: _CreationTimes) -> None:
        events: list[tuple[int, int, int, int]] = []
        for place, node in enumerate(nodes):
            events.append((times.made(node), _MADE, node.number, place))
            events += [(begin, run, node.number, place) for run, begin in enumerate(node.runs)]
        events.sort()
        self._made: dict[int, int] = {}
        self._runs = {id(node): [0] * len(node.runs) for node in nodes}
        for position, (_, run, _, place) in enumerate(events):
            key = id(nodes[place])
            if run == _MADE:
                self._made[key] = position
            else:
                self._runs[key][run] = position
        self._times_of_events = [event[0] for event in events]

    def made(self, node: NodeNotes) -> int:
        """The position at which it was made."""
        return self._made[id(node)]

    def runs(self, node: NodeNotes) -> list[int]:
        """The positions at which it ran."""
        return self._runs[id(node)]

    def released(self, node: NodeNotes) -> int | None:
        """The position after which what it kept is gone."""
        return None if node.released is None else self.runs(node)[node.released]

    def at(self, when: int) -> int:
        """The position of the last event before this time."""
        return max(bisect_left(self._times_of_events, when) - 1, 0)

    def seconds(self, position: int, begin: int) -> float:
        """Seconds from the beginning to a position."""
        return (self._times_of_events[position] - begin) / 1e9


def _find_ends_of_checkpoints(nodes: Iterable[NodeNotes], order: _EventOrder) -> dict[int, int | None]:
    """Number of a checkpoint → when its arguments are let go: with the last of its holders."""
    ends: dict[int, int | None] = {}
    for node in nodes:
        for frame in {slot.frame for slot in node.slots if slot.frame}:
            end, known = order.released(node), ends.get(frame, -1)
            ends[frame] = None if end is None or known is None else max(end, known)
    return ends


def _describe_node(node: NodeNotes, origin: Origin) -> Row:
    line = origin.line
    return {
        "module": origin.module,
        "call": origin.call,
        "node": node.name,
        "number": node.number,
        "file": line and line.file,
        "line": line and line.line,
        "function": line and line.function,
        "operation": line and line.operation,
    }


def _describe_runs(node: NodeNotes, order: _EventOrder, begin: int) -> Row:
    runs = order.runs(node)
    return {"unpacked": runs, "unpacked_s": [order.seconds(run, begin) for run in runs]}


def _describe_life(
    node: NodeNotes, slot: SlotNotes, order: _EventOrder, ends: dict[int, int | None], begin: int
) -> Row:
    packed: int | None = order.made(node)
    if slot.held == "checkpoint":
        packed = None if slot.packed is None else order.at(slot.packed)
    released = order.released(node)
    if slot.held == "attribute":
        released = None
    elif slot.held == "argument":
        released = ends[slot.frame]
    return {
        "packed": packed,
        "packed_s": None if packed is None else order.seconds(packed, begin),
        "released": released,
    }


def _describe_making(tensor: TensorNotes | None, line: Line | None, clock: OperationClock | None) -> Row:
    if tensor is None:
        return {}
    maker = tensor.maker
    cost = find_cost_of_saved(
        tensor.kind, None if maker is None else maker.node, line.operation if line is not None else ""
    )
    return {
        "maker": maker and maker.node,
        "maker_number": maker and maker.number,
        "sources": maker and maker.sources,
        "seconds": clock.seconds_at(maker.number) if maker is not None and clock is not None else None,
        "remake": cost and str(cost),
        "price": cost and cost.price,
    }


def _attribute_memory(columns: Columns) -> None:
    """Give each piece of memory to the row that saved it first."""
    packed, pieces, sizes = columns["packed"], columns["storages"], columns["storage_bytes"]
    entries = range(len(packed))
    first: dict[int, int] = {}
    savers: Counter[int] = Counter()
    resident = [0] * len(packed)
    for entry in sorted(entries, key=lambda entry: inf if packed[entry] is None else packed[entry]):
        for number, size in dict(zip(pieces[entry], sizes[entry], strict=True)).items():
            if first.setdefault(number, entry) == entry and columns["kind"][entry] not in PERMANENT:
                resident[entry] += size
            savers[number] += 1
    columns["entry"] += entries
    columns["resident"] += resident
    columns["first_saver"] += [first[pieces[entry][0]] if pieces[entry] else entry for entry in entries]
    columns["sharers"] += [savers[pieces[entry][0]] - 1 if pieces[entry] else 0 for entry in entries]


def _never_falling(numbers: list[int]) -> list[int]:
    highest, result = 0, []
    for number in numbers:
        highest = max(highest, number)
        result.append(highest)
    return result
