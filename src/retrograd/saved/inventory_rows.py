"""From what was noted while a program ran to the rows of a table."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from retrograd.graph.node import Line
from retrograd.graph.origins import Origin, Origins
from retrograd.hooks.operation_clock import OperationClock
from retrograd.saved.facts import NodeFacts, SlotFacts, TensorFacts
from retrograd.saved.inventory_columns import PERMANENT, SCHEMA
from retrograd.saved.inventory_watch import SavedWatch
from retrograd.saved.remakes import choose_remake

_NOWHERE = Origin()

Row = dict[str, Any]


def make_table(watch: SavedWatch, origins: Origins, clock: OperationClock | None, thread: int) -> pa.Table:
    """The table of an inventory.

    Args:
        watch: what was seen.
        origins: where nodes were made.
        clock: how long that took; None where it was not measured.
        thread: number of the thread that the clock has listened to.
    """
    times = _Times(watch, list(_tell_times(origins, clock, thread)))
    order = _Order(watch.nodes, times)
    ends = _find_ends_of_checkpoints(watch.nodes, order)
    rows: list[Row] = []
    for node in sorted(watch.nodes, key=order.made):
        origin = origins.find(node.number) or _NOWHERE
        for slot in node.slots:
            rows.append(
                {
                    "entry": len(rows),
                    **_describe_place(node, slot, origin),
                    **_describe_tensor(slot.tensor),
                    **_describe_life(node, slot, order, ends, watch.begin),
                    **_describe_making(slot.tensor, origin.line, clock),
                }
            )
    _attribute_memory(rows)
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def _tell_times(origins: Origins, clock: OperationClock | None, thread: int) -> Iterator[tuple[int, int, int]]:
    """Thread, number and a time at which all nodes of smaller numbers had been made."""
    for span in origins.spans:
        yield span.thread, span.first, span.begin
        yield span.thread, span.last, span.end
    for number, when in clock.ends if clock is not None else ():
        yield thread, number, when


class _Times:
    """When nodes were made: the first time at which all nodes up to theirs were known to be there."""

    def __init__(self, watch: SavedWatch, times: Iterable[tuple[int, int, int]]) -> None:
        known: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for each, number, when in (*times, *watch.clock):
            known[each].append((number, when))
        self._numbers: dict[int, list[int]] = {}
        self._times: dict[int, list[int]] = {}
        for each, pairs in known.items():
            pairs.sort(key=lambda pair: pair[1])
            self._numbers[each] = _never_falling([number for number, _ in pairs])
            self._times[each] = [when for _, when in pairs]

    def made(self, node: NodeFacts) -> int:
        """When a node was made, or a little later."""
        numbers = self._numbers.get(node.thread, [])
        place = bisect_right(numbers, node.number)
        return min(self._times[node.thread][place], node.seen) if place < len(numbers) else node.seen


class _Order:
    """Positions of events: a node that keeps something is made, or it runs."""

    def __init__(self, nodes: Iterable[NodeFacts], times: _Times) -> None:
        self._times = times
        events: list[tuple[int, int, int, int]] = []
        for place, node in enumerate(nodes):
            events.append((times.made(node), 0, node.number, place))
            events += [(begin, 1, run, place) for run, (begin, _) in enumerate(node.runs)]
        events.sort()
        places = {event: position for position, event in enumerate(events)}
        self._made: dict[int, int] = {}
        self._runs: dict[int, list[int]] = {}
        for place, node in enumerate(nodes):
            self._made[id(node)] = places[times.made(node), 0, node.number, place]
            self._runs[id(node)] = [places[begin, 1, run, place] for run, (begin, _) in enumerate(node.runs)]
        self._times_of_events = [event[0] for event in events]
        self.count = len(events)

    def made(self, node: NodeFacts) -> int:
        """The position at which it was made."""
        return self._made[id(node)]

    def runs(self, node: NodeFacts) -> list[int]:
        """The positions at which it ran."""
        return self._runs[id(node)]

    def released(self, node: NodeFacts) -> int | None:
        """The position after which what it kept is gone."""
        return None if node.released is None else self.runs(node)[node.released]

    def at(self, when: int) -> int:
        """The position of the last event before this time."""
        return max(bisect_left(self._times_of_events, when) - 1, 0)

    def seconds(self, position: int, begin: int) -> float:
        """When that was."""
        return (self._times_of_events[position] - begin) / 1e9


def _find_ends_of_checkpoints(nodes: Iterable[NodeFacts], order: _Order) -> dict[int, int | None]:
    """Number of a checkpoint → when its arguments are let go: with the last of its holders."""
    ends: dict[int, int | None] = {}
    for node in nodes:
        for frame in {slot.frame for slot in node.slots if slot.frame}:
            end, known = order.released(node), ends.get(frame, -1)
            ends[frame] = None if end is None or known is None else max(end, known)
    return ends


def _describe_place(node: NodeFacts, slot: SlotFacts, origin: Origin) -> Row:
    line = origin.line
    return {
        "module": origin.module,
        "call": origin.call,
        "node": node.name,
        "number": node.number,
        "slot": slot.slot,
        "held": slot.held,
        "file": line and line.file,
        "line": line and line.line,
        "function": line and line.function,
        "operation": line and line.operation,
    }


def _describe_tensor(tensor: TensorFacts | None) -> Row:
    if tensor is None:
        return {"kind": "unknown", "name": "", "asked": 0, "storages": [], "storage_bytes": []}
    return {
        "kind": tensor.kind,
        "name": tensor.name,
        "shape": tensor.shape,
        "dtype": tensor.dtype,
        "device": tensor.device,
        "strides": tensor.strides,
        "offset": tensor.offset,
        "version": tensor.version,
        "asked": tensor.asked,
        "storages": [number for number, _ in tensor.pieces],
        "storage_bytes": [count for _, count in tensor.pieces],
    }


def _describe_life(node: NodeFacts, slot: SlotFacts, order: _Order, ends: dict[int, int | None], begin: int) -> Row:
    made, runs = order.made(node), order.runs(node)
    packed: int | None = made
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
        "unpacked": runs,
        "unpacked_s": [order.seconds(run, begin) for run in runs],
        "released": released,
    }


def _describe_making(tensor: TensorFacts | None, line: Line | None, clock: OperationClock | None) -> Row:
    if tensor is None:
        return {}
    maker = tensor.maker
    remake = choose_remake(
        tensor.kind, None if maker is None else maker.node, line.operation if line is not None else ""
    )
    return {
        "maker": maker and maker.node,
        "maker_number": maker and maker.number,
        "sources": maker and maker.sources,
        "seconds": clock.seconds_at(maker.number) if maker is not None and clock is not None else None,
        "remake": remake and str(remake),
        "price": remake and remake.price,
    }


def _attribute_memory(rows: list[Row]) -> None:
    """Give each piece of memory to the row that saved it first."""
    first: dict[int, int] = {}
    counts: Counter[int] = Counter()
    for row in sorted(rows, key=_by_packing):
        new = [number for number in row["storages"] if number not in first]
        first.update((number, row["entry"]) for number in new)
        counts.update(row["storages"])
        sizes = dict(zip(row["storages"], row["storage_bytes"], strict=True))
        row["resident"] = 0 if row["kind"] in PERMANENT else sum(sizes[number] for number in new)
    for row in rows:
        number = next(iter(row["storages"]), None)
        row["first_saver"] = row["entry"] if number is None else first[number]
        row["sharers"] = 0 if number is None else counts[number] - 1


def _by_packing(row: Row) -> tuple[float, int]:
    return (float("inf") if row["packed"] is None else row["packed"], row["entry"])


def _never_falling(numbers: list[int]) -> list[int]:
    highest, result = 0, []
    for number in numbers:
        highest = max(highest, number)
        result.append(highest)
    return result
