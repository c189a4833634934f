"""Items that wait to be written: a queue that is bounded by bytes and never makes the training thread wait."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from retrograd.core.amounts import count_of, list_names
from retrograd.core.history.kept import count_bytes
from retrograd.core.history.sink import Event, KeptTensor, RowBatch
from retrograd.core.statistics.row import ROW

_BYTES_AN_ITEM = 200
"""About what Python needs for an item besides its data."""


@dataclass(slots=True)
class Unwritten:
    """How much was not written."""

    rows: int = 0
    events: int = 0
    tensors: int = 0
    files: int = 0

    def __bool__(self) -> bool:
        return bool(self.rows or self.events or self.tensors or self.files)

    def __add__(self, other: Unwritten) -> Unwritten:
        return Unwritten(
            self.rows + other.rows, self.events + other.events, self.tensors + other.tensors, self.files + other.files
        )

    def tell(self) -> dict[str, int]:
        """The numbers by name, as files have them."""
        told = {"rows": self.rows, "events": self.events, "tensors": self.tensors}
        return told | ({"files": self.files} if self.files else {})

    def __str__(self) -> str:
        counts = {"row": self.rows, "event": self.events, "tensor": self.tensors, "file": self.files}
        return list_names([count_of(count, one) for one, count in counts.items() if count])


@dataclass(slots=True)
class Load:
    """All items that are taken from the queue at once."""

    batches: list[RowBatch] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    tensors: list[KeptTensor] = field(default_factory=list)

    @property
    def items(self) -> list[RowBatch | Event | KeptTensor]:
        """All of it, by kind."""
        return [*self.batches, *self.events, *self.tensors]

    def __bool__(self) -> bool:
        return bool(self.batches or self.events or self.tensors)


@dataclass(slots=True)
class Room:
    """Bytes that may wait, and those that do; one thing that is larger waits alone."""

    most: int
    taken: int = 0

    def take(self, size: int) -> bool:
        """Take so many bytes; False if there is no room for them."""
        if self.taken and self.taken + size > self.most:
            return False
        self.taken += size
        return True


class WriteQueue:
    """Items on their way to the writer thread.

    Tensors have a bound of their own: a policy that held them for long hands them over all at once, and rows shall not
    be lost for it.

    Args:
        max_bytes: what may wait at most, besides tensors; an item that finds the queue full is lost, and counted.
        max_tensor_bytes: the same for tensors; by default as much again.

    Attributes:
        added: how many items were ever added.
        lost: what found the queue full.
    """

    def __init__(self, max_bytes: int, max_tensor_bytes: int | None = None) -> None:
        self.added = 0
        self.lost = Unwritten()
        self._items: list[RowBatch | Event | KeptTensor] = []
        self._rows = Room(max_bytes)
        self._tensors = Room(max_bytes if max_tensor_bytes is None else max_tensor_bytes)
        self._wake_bytes = max_bytes // 2
        self._lock = threading.Lock()

    def add(self, item: RowBatch | Event | KeptTensor) -> bool:
        """Add an item; False if it is lost because too much is waiting."""
        with self._lock:
            if not self._room(item).take(_count_item(item)):
                self._count_lost(item)
                return False
            self._items.append(item)
            self.added += 1
            return True

    @property
    def is_half_full(self) -> bool:
        """True if it is time to write."""
        return max(self._rows.taken, self._tensors.taken) > self._wake_bytes

    def take(self) -> Load:
        """All that waits. It is no longer counted as waiting from here on."""
        with self._lock:
            items, self._items = self._items, []
            self._rows.taken = self._tensors.taken = 0
        load = Load()
        for item in items:
            if isinstance(item, RowBatch):
                load.batches.append(item)
            elif isinstance(item, Event):
                load.events.append(item)
            else:
                load.tensors.append(item)
        return load

    def put_back(self, load: Load) -> None:
        """Put items that could not be written back in front. One that has no room any more is lost, and counted."""
        with self._lock:
            back: list[RowBatch | Event | KeptTensor] = []
            for item in load.items:
                if self._room(item).take(_count_item(item)):
                    back.append(item)
                else:
                    self._count_lost(item)
            self._items[:0] = back

    def give_up(self) -> None:
        """Count all that still waits as lost."""
        for item in self.take().items:
            self._count_lost(item)

    def _room(self, item: RowBatch | Event | KeptTensor) -> Room:
        return self._tensors if isinstance(item, KeptTensor) else self._rows

    def _count_lost(self, item: RowBatch | Event | KeptTensor) -> None:
        if isinstance(item, RowBatch):
            self.lost.rows += count_rows(item)
        elif isinstance(item, Event):
            self.lost.events += 1
        else:
            self.lost.tensors += 1


def count_rows(batch: RowBatch) -> int:
    """Rows of a batch."""
    return len(batch.rows) // ROW.itemsize


def _count_item(item: RowBatch | Event | KeptTensor) -> int:
    if isinstance(item, RowBatch):
        return _BYTES_AN_ITEM + len(item.rows) + len(item.bins)
    return _BYTES_AN_ITEM + (count_bytes(item.tensor) if isinstance(item, KeptTensor) else 0)
