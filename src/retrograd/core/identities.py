"""Tables with weak keys that are compared by identity: nothing is asked of what they hold.

A module may have a ``__hash__``, ``__eq__``, ``__bool__``, ``__len__`` or ``__getattr__`` of its own, any of which may
raise, and does while it is constructed. A weak key of the standard library hashes and compares what it refers to, and
one of ``torch.utils.weak`` asks it for an attribute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, MutableSet
from functools import partial
from typing import Any, Generic, TypeVar, cast, overload
from weakref import ref

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


class IdentityDict(MutableMapping[K, V], Generic[K, V]):
    """Values by things that it does not hold, in the order in which they came. May be changed while it is iterated."""

    __slots__ = ("__weakref__", "_entries", "_here")

    def __init__(self, items: Iterable[tuple[K, V]] = ()) -> None:
        self._entries: dict[int, tuple[ref[K], V]] = {}
        self._here = ref(self)  # what a dict held of itself would be a cycle
        for thing, value in items:
            self[thing] = value

    def __getitem__(self, thing: K) -> V:
        return self._entries[id(thing)][1]

    def __setitem__(self, thing: K, value: V) -> None:
        number = id(thing)
        found = self._entries.get(number)
        find = ref(thing, partial(_forget, self._here, number)) if found is None else found[0]
        self._entries[number] = find, value

    def __delitem__(self, thing: K) -> None:
        del self._entries[id(thing)]

    def __contains__(self, thing: object) -> bool:
        return id(thing) in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def get(self, thing: K, default: None = None, /) -> V | None: ...

    @overload
    def get(self, thing: K, default: V | T, /) -> V | T: ...

    def get(self, thing: K, default: Any = None, /) -> Any:
        """The value of a thing; ``default`` where it has none."""
        found = self._entries.get(id(thing))
        return default if found is None else found[1]

    def clear(self) -> None:
        """Forget all of them."""
        self._entries.clear()

    def __iter__(self) -> Iterator[K]:
        for find, _ in list(self._entries.values()):
            thing = find()
            if thing is not None:
                yield thing


def _forget(find_table: ref[IdentityDict[Any, Any]], number: int, _: object) -> None:
    table = find_table()
    if table is not None:
        table._entries.pop(number, None)


class IdentitySet(MutableSet[K], Generic[K]):
    """Things that it does not hold, in the order in which they came. May be changed while it is iterated."""

    __slots__ = ("__weakref__", "_things")

    def __init__(self, things: Iterable[K] = ()) -> None:
        self._things: IdentityDict[K, None] = IdentityDict((thing, None) for thing in things)

    def add(self, thing: K) -> None:
        self._things[thing] = None

    def update(self, things: Iterable[K]) -> None:
        """Add all of these."""
        for thing in things:
            self._things[thing] = None

    def discard(self, thing: K) -> None:
        self._things.pop(thing, cast("Any", None))

    def clear(self) -> None:
        """Forget all of them."""
        self._things.clear()

    def __contains__(self, thing: object) -> bool:
        return thing in self._things

    def __len__(self) -> int:
        return len(self._things)

    def __iter__(self) -> Iterator[K]:
        return iter(self._things)
