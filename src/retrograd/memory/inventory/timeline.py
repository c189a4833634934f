"""The columns of an inventory, and what follows from its table: memory by its savers, and bytes at each position."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

SCHEMA = pa.schema(
    [
        ("entry", pa.int64()),  # number of the row
        ("module", pa.string()),  # path of the innermost module in whose call it was saved; null outside of all
        ("call", pa.int32()),  # which call of that module in its forward: 1, 2, …
        ("node", pa.string()),  # kind of the node that keeps it
        ("number", pa.uint64()),  # that node's sequence number
        ("slot", pa.string()),  # torch's name for it; ctx.NAME for an attribute, checkpoint[N] for an argument
        (
            "held",
            pa.string(),
        ),  # saved, attribute, hooks, checkpoint or argument: see inventory.notes.Held
        ("kind", pa.string()),  # parameter, parameter view, buffer, buffer view, cast, input, intermediate, unknown
        ("name", pa.string()),  # of that parameter or buffer; empty for anything else
        ("shape", pa.list_(pa.int64())),  # null for nested tensors, and for what was never there
        ("dtype", pa.string()),
        ("device", pa.string()),
        ("strides", pa.list_(pa.int64())),  # in elements
        ("offset", pa.int64()),  # in elements
        ("version", pa.int64()),  # how often its memory had been written to when the pass began
        ("asked", pa.int64()),  # bytes of its elements, as a copy would take them
        ("resident", pa.int64()),  # bytes of memory that are there because of this row, and of no row before it
        ("storages", pa.list_(pa.int64())),  # numbers of its pieces of memory
        ("storage_bytes", pa.list_(pa.int64())),  # bytes of each
        ("first_saver", pa.int64()),  # the first row with the same memory
        ("sharers", pa.int32()),  # how many other rows have the same memory
        ("packed", pa.int64()),  # position at which it was saved; null if it was never there
        ("packed_s", pa.float64()),  # seconds since the beginning
        ("unpacked", pa.list_(pa.int64())),  # positions at which its node ran
        ("unpacked_s", pa.list_(pa.float64())),
        ("released", pa.int64()),  # position after which it is held no more; null: until the graph is dropped
        ("file", pa.string()),  # source line of the forward
        ("line", pa.int32()),
        ("function", pa.string()),
        ("operation", pa.string()),  # torch's function that was called there
        ("maker", pa.string()),  # kind of the node that made it; null where no recorded operation has
        ("maker_number", pa.uint64()),
        ("sources", pa.list_(pa.uint64())),  # numbers of the nodes that made what the maker was given
        ("seconds", pa.float64()),  # how long the operation took that made it; null where that is not known
        ("remake", pa.string()),  # what would recompute it; null where only its module can
        ("price", pa.string()),  # of that: free, cheap or dear
    ]
)

PERMANENT = ("parameter", "parameter view", "buffer", "buffer view")
"""Kinds whose memory is there anyway."""


@dataclass(frozen=True, slots=True)
class Saver:
    """A node that keeps a piece of memory.

    Attributes:
        entry: row in the table.
        node: kind of the node.
        number: its sequence number.
        slot: torch's name for what it keeps there.
        packed: position at which it was saved.
        unpacked: positions at which the node ran.
        released: position after which the node holds it no more; None: until the graph is dropped.
    """

    entry: int
    node: str
    number: int
    slot: str
    packed: int
    unpacked: tuple[int, ...]
    released: int | None


@dataclass(frozen=True, slots=True)
class HeldStorage:
    """A piece of memory that is there because nodes keep it. What a planner decides about.

    Attributes:
        storage: its number.
        bytes: its size.
        kind, name, device, dtype: of what its first saver keeps of it.
        savers: all nodes that keep it, or a part of it, in the order in which they saved it.
        packed: position of the first saving.
        unpacked: positions at which it is wanted, in order.
        released: position after which none of them holds it; None: until the graph is dropped.
        maker: kind of the node that made it; None where no recorded operation has.
        maker_number: that node's sequence number.
        sources: numbers of the nodes that made what the maker was given.
        seconds: how long the operation took that made it; None where that is not known.
        remake: what would recompute it, in words; None where only its module can.
        price: of that: ``free``, ``cheap`` or ``dear``.
        module, call: where its first saver was made.
    """

    storage: int
    bytes: int
    kind: str
    name: str
    device: str
    dtype: str
    savers: tuple[Saver, ...]
    packed: int
    unpacked: tuple[int, ...]
    released: int | None
    maker: str | None
    maker_number: int | None
    sources: tuple[int, ...]
    seconds: float | None
    remake: str | None
    price: str | None
    module: str | None
    call: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bytes held over the forward and the backward.

    A position is an event: a node that keeps something is made, or runs. The last position is the end, when the last
    pass is over.

    Attributes:
        position: 0, 1, …
        seconds: when each event took place, since the beginning; of the end: NaN.
        held: bytes that nodes hold while the event takes place. What a node holds it still holds while it runs.
        runs: whether the event is the run of a node.
        entry: first row of the node; −1 for the end.
    """

    position: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]
    held: npt.NDArray[np.int64]
    runs: npt.NDArray[np.bool_]
    entry: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Peak:
    """The position at which most is held.

    Attributes:
        position: of the timeline.
        bytes: held there.
        entries: rows of the table that are alive there, those first that account for most bytes.
    """

    position: int
    bytes: int
    entries: tuple[int, ...]


Span = tuple[int, int]
"""First position, and the one after the last."""


def list_storages(table: pa.Table, positions: int) -> tuple[HeldStorage, ...]:
    """All memory that nodes keep and that is not a parameter's or buffer's, largest first."""
    rows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    sizes: dict[int, int] = {}
    for row in table.to_pylist():
        if row["kind"] in PERMANENT or row["packed"] is None:
            continue
        for number, count in dict(zip(row["storages"], row["storage_bytes"], strict=True)).items():
            rows[number].append(row)
            sizes[number] = max(sizes.get(number, 0), count)
    found = [_describe(number, sizes[number], sharing) for number, sharing in rows.items()]
    return tuple(sorted(found, key=lambda each: (-each.bytes, each.packed)))


def make_timeline(table: pa.Table, storages: Sequence[HeldStorage], positions: int) -> Timeline:
    """Bytes at each position."""
    change = np.zeros(positions + 1, dtype=np.int64)
    for storage in storages:
        for first, after in spans_of(storage.savers, positions):
            change[first] += storage.bytes
            change[after] -= storage.bytes
    seconds = np.full(positions, np.nan)
    runs = np.zeros(positions, dtype=bool)
    entry = np.full(positions, -1, dtype=np.int64)
    columns = ("entry", "held", "packed", "packed_s", "unpacked", "unpacked_s")
    for row, held, packed, when, unpacked, whens in zip(*(table[name].to_pylist() for name in columns), strict=True):
        events = [*zip(unpacked, whens, strict=True)]
        if packed is not None and held != "checkpoint":
            events.append((packed, when))
        for position, time in events:
            seconds[position] = time
            if entry[position] < 0:
                entry[position] = row
        runs[unpacked] = True
    return Timeline(np.arange(positions), seconds, np.cumsum(change[:-1]), runs, entry)


def spans_of(savers: Iterable[Saver], positions: int) -> list[Span]:
    """Spans of positions in which at least one of these holds its memory."""
    spans: list[Span] = []
    for saver in sorted(savers, key=lambda saver: saver.packed):
        after = positions if saver.released is None else saver.released + 1
        if spans and saver.packed <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], after))
        else:
            spans.append((saver.packed, after))
    return spans


def is_held(storage: HeldStorage, position: int, positions: int) -> bool:
    """Return whether it is held at a position."""
    return any(first <= position < after for first, after in spans_of(storage.savers, positions))


_OF_FIRST = ("kind", "name", "device", "dtype", "packed", "module", "call")
_OF_MAKER = ("maker", "maker_number", "seconds", "remake", "price")
"""Columns that a piece of memory has from its first saver, and from the first that knows what made it."""


def _describe(number: int, size: int, rows: list[dict[str, Any]]) -> HeldStorage:
    rows = sorted(rows, key=lambda row: (row["packed"], row["entry"]))
    made = next((row for row in rows if row["maker"] is not None), rows[0])
    savers = tuple(map(_make_saver, rows))
    ends = [saver.released for saver in savers]
    return HeldStorage(
        storage=number,
        bytes=size,
        savers=savers,
        unpacked=tuple(sorted({position for saver in savers for position in saver.unpacked})),
        released=None if None in ends else max(end for end in ends if end is not None),
        sources=tuple(made["sources"] or ()),
        **{name: rows[0][name] for name in _OF_FIRST},
        **{name: made[name] for name in _OF_MAKER},
    )


def _make_saver(row: dict[str, Any]) -> Saver:
    fields = {name: row[name] for name in ("entry", "node", "number", "slot", "packed", "released")}
    return Saver(**fields, unpacked=tuple(row["unpacked"]))
