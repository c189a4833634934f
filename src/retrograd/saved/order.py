"""In which order a backward pass asks for what the forward pass packed: guessed first, then learned."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_LEARNED = 16
"""How many kinds of passes are remembered: a GAN has two, and batches of several lengths one each."""


@dataclass(slots=True)
class Pass:
    """One forward pass, and the backward pass over it.

    Attributes:
        items: weak references to what was packed, in this order.
        kind: stands for the sizes that were packed; equal passes are expected to be read equally.
        nbytes: of all of them together.
        sizes: of each, in bytes.
        expected: in which order the items will be asked for; known from the first request on.
        turns: item → where it stands in ``expected``.
        asked: in which order they were, each once.
        known: those that were.
    """

    items: list[weakref.ref[Any]] = field(default_factory=list)
    kind: int = 0
    nbytes: int = 0
    sizes: list[int] = field(default_factory=list)
    expected: list[int] | None = None
    turns: dict[int, int] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)
    known: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Position:
    """Where an item was packed."""

    number: int
    of: Pass


class Order(Generic[T]):
    """The order of a policy's items.

    A pass ends when something is packed after something was asked for. The first pass of a kind is expected to be read
    backwards; a later one like the last of its kind.
    """

    def __init__(self) -> None:
        self._pass = Pass()
        self._learned: OrderedDict[int, list[int]] = OrderedDict()
        self._finished: Pass | None = None

    def add(self, item: T, nbytes: int) -> Position:
        """An item is packed."""
        current = self._begin()
        current.items.append(weakref.ref(item))
        current.kind = hash((current.kind, nbytes))
        current.nbytes += nbytes
        current.sizes.append(nbytes)
        return Position(len(current.items) - 1, current)

    def is_needed_first(self, nbytes: int, window: int) -> bool:
        """Whether what is packed next will be among the first to be asked for, by what the last pass did.

        Args:
            nbytes: its size. A pass that packs other sizes is not like the last one.
            window: the first so many bytes count.
        """
        number = len(self._begin().items)
        last = self._finished
        if last is None or number >= len(last.sizes) or last.sizes[number] != nbytes:
            return False
        for first in last.asked:
            window -= last.sizes[first]
            if window < 0:
                return False
            if first == number:
                return True
        return False

    def _begin(self) -> Pass:
        """The pass that packs now."""
        if self._pass.asked:
            self._finished, self._pass = self._pass, Pass()
        return self._pass

    def ask(self, position: Position) -> None:
        """An item is asked for."""
        asked = position.of
        if asked.expected is None:
            asked.expected = self._learned.get(asked.kind) or list(range(len(asked.items) - 1, -1, -1))
            asked.turns = {number: turn for turn, number in enumerate(asked.expected)}
            self._learned[asked.kind] = asked.asked
            self._learned.move_to_end(asked.kind)
            if len(self._learned) > _LEARNED:
                self._learned.popitem(last=False)
        if position.number not in asked.known:
            asked.known.add(position.number)
            asked.asked.append(position.number)

    def upcoming(self, position: Position) -> Iterator[T]:
        """Those that will be asked for after this one, the next one first."""
        around = position.of
        turn = around.turns.get(position.number)
        following = range(position.number - 1, -1, -1) if turn is None else (around.expected or [])[turn + 1 :]
        for number in following:
            item = around.items[number]() if number < len(around.items) else None
            if item is not None:
                yield item
