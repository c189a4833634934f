"""Transfers of packed ranges: how many copies out are in flight, and in which order a backward pass asks for them back.

The order is guessed at first, then learned.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class InFlight(Generic[T]):
    """Copies out of memory that are in flight, the oldest first.

    All that it knows is in one queue, so that an interrupt between two lines leaves nothing that does not fit.
    """

    def __init__(self) -> None:
        self._items: deque[tuple[T, int, int]] = deque()  # each with the bytes before it and up to its end

    def add(self, item: T, nbytes: int, window: int) -> list[T]:
        """Add one; returns those that come out, since they are not among the last ``window`` bytes.

        The one that is added does not come out, however large it is: nothing would be computed beside its copy.
        """
        start = self._items[-1][2] if self._items else 0
        end = start + nbytes
        self._items.append((item, start, end))
        gone = []
        while end - self._items[0][1] > max(window, nbytes):
            gone.append(self._items.popleft()[0])
        return gone

    def drain(self) -> list[T]:
        """Take all out."""
        return [self._items.popleft()[0] for _ in range(len(self._items))]


_LEARNED = 16
"""How many kinds of passes are remembered: a GAN has two, and batches of several lengths one each."""


@dataclass(slots=True)
class PackedPass:
    """A forward pass, and the backward pass over it.

    Attributes:
        items: weak references to what was packed, in this order.
        nbytes: of all of them together.
        sizes: of each, in bytes; passes with equal ones are expected to be read equally.
        asked: those that were asked for, in this order, each once.
        known: the same numbers as ``asked``, as a set.
        route: in which order they are expected to be asked for; known from the first request on.
        expected: so many of ``route`` were asked for in the last pass of this kind; the others come after.
        turns: item → where it stands in ``route``.
        ends: bytes of the first so many of ``route``.
        begun: so many of ``route`` have been given out as due.
    """

    items: list[weakref.ref[Any]] = field(default_factory=list)
    nbytes: int = 0
    sizes: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    known: set[int] = field(default_factory=set)
    route: list[int] = field(default_factory=list)
    expected: int = 0
    turns: dict[int, int] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    begun: int = 0

    def expect(self, learned: Iterable[int]) -> None:
        """Expect requests in the order of an earlier pass, and then for the last first."""
        count = len(self.items)
        first = dict.fromkeys(number for number in learned if number < count)
        route = [*first, *(number for number in range(count - 1, -1, -1) if number not in first)]
        self.route, self.expected = route, len(first) or count
        self.ends = list(accumulate((self.sizes[number] for number in route), initial=0))
        self.turns = {number: turn for turn, number in enumerate(route)}  # last: other threads look here first


@dataclass(slots=True, eq=False)
class PackPosition:
    """The place of an item: its number in a pass."""

    number: int
    of: PackedPass


class AskOrder(Generic[T]):
    """The order of a policy's items.

    A pass ends when something is packed after something was asked for. The first pass of a kind is expected to be read
    backwards; a later one like the last of its kind.
    """

    def __init__(self) -> None:
        self._pass = PackedPass()
        self._learned: OrderedDict[tuple[int, ...], list[int]] = OrderedDict()
        self._finished: PackedPass | None = None

    def add(self, item: T, nbytes: int) -> PackPosition:
        """Record that an item is packed."""
        current = self._begin()
        current.nbytes += nbytes
        current.sizes[len(current.items) :] = [nbytes]  # in place of one that an interrupt has cut short
        current.items.append(weakref.ref(item))
        return PackPosition(len(current.items) - 1, current)

    def is_needed_first(self, nbytes: int, window: int) -> bool:
        """Return whether what is packed next will be among the first to be asked for, by what the last pass did.

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

    def _begin(self) -> PackedPass:
        """Return the pass that packs now; a new one if the last one was asked for something."""
        if self._pass.asked:
            self._finished, self._pass = self._pass, PackedPass()
        return self._pass

    def ask(self, position: PackPosition) -> None:
        """Record that an item is asked for."""
        asked = position.of
        if not asked.route:
            kind = tuple(asked.sizes)
            asked.expect(self._learned.get(kind, ()))
            self._learned[kind] = asked.asked
            self._learned.move_to_end(kind)
            if len(self._learned) > _LEARNED:
                self._learned.popitem(last=False)
        if position.number not in asked.known:
            asked.known.add(position.number)
            asked.asked.append(position.number)

    def due(self, position: PackPosition, window: int, least: int, *, is_missed: bool) -> Sequence[T]:
        """List those that are to be brought back now that this one is asked for; most often none.

        As soon as less than half of the window lies ahead of it, it is filled again. Each is given out once in a pass.

        Args:
            position: of what is asked for.
            window: so many bytes are to lie ahead.
            least: so many items are, whatever their size.
            is_missed: it had not been brought back. The pass goes another way than was expected, or goes once more, so
                that what follows from here is given out again.
        """
        around = position.of
        turn = around.turns.get(position.number)
        if turn is None:
            return ()
        following = turn + 1
        begun = following if is_missed or around.begun < following else around.begun
        used = around.ends[following]
        if begun - following >= least and around.ends[begun] - used >= window // 2:
            around.begun = begun
            return ()
        end = around.expected if turn < around.expected else len(around.route)
        first = begun
        while begun < end and (begun - following < least or around.ends[begun] - used < window):
            begun += 1
        around.begun = begun
        items = (around.items[number]() for number in around.route[first:begun])
        return [item for item in items if item is not None]

    def upcoming(self, position: PackPosition) -> Iterator[T]:
        """Go through those that will be asked for after this one, the next one first."""
        around = position.of
        turn = around.turns.get(position.number, around.expected)
        is_expected = turn < around.expected
        following = around.route[turn + 1 : around.expected] if is_expected else range(position.number - 1, -1, -1)
        for number in following:
            item = around.items[number]()
            if item is not None:
                yield item
