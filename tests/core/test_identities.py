from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from retrograd.core.identities import IdentityDict, IdentitySet


class Touchy:
    """Whatever is asked of it raises."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    def __hash__(self) -> int:
        raise RuntimeError

    def __bool__(self) -> bool:
        raise RuntimeError

    def __getattr__(self, name: str) -> object:
        raise RuntimeError


class Alike:
    """Equal to every other one."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


@pytest.mark.parametrize("kind", [Touchy, Alike])
def test_things_are_told_apart_by_identity_alone(kind: type) -> None:
    a, b = kind(), kind()
    table = IdentityDict([(a, "a")])
    assert a in table
    assert b not in table
    assert table.get(b) is None
    table[b] = "b"
    table[a] = "A"
    assert [(id(key), value) for key, value in table.items()] == [(id(a), "A"), (id(b), "b")]
    assert table.setdefault(a, "c") == table.pop(a) == "A"
    assert len(table) == 1
    with pytest.raises(KeyError):
        table[a]
    few = IdentitySet([a, b, a])
    few.discard(a)
    few.discard(a)
    few.update([b])
    assert a not in few
    assert b in few
    assert [id(thing) for thing in few] == [id(b)]


def test_nothing_is_held_and_what_is_gone_is_forgotten() -> None:
    """A new thing may have the place in memory of one that is gone."""
    table: IdentityDict[Touchy, int] = IdentityDict()
    for number in range(100):
        thing = Touchy()
        assert thing not in table
        table[thing] = number
    assert list(table.values()) == [99]
    del thing
    assert len(table) == 0
    assert not list(table)


def test_the_table_is_no_cycle() -> None:
    kept = Alike()
    table = IdentityDict([(kept, 1)])
    few = IdentitySet([kept])
    find = weakref.ref(table), weakref.ref(few)
    gc.disable()
    try:
        del table, few
        assert find[0]() is None
        assert find[1]() is None
    finally:
        gc.enable()


def test_it_may_change_while_it_is_iterated() -> None:
    things = [Alike() for _ in range(10)]
    few = IdentitySet(things)

    def drop() -> Iterator[int]:
        for thing in few:
            few.discard(thing)
            few.add(Alike())
            if things:
                things.pop()
            yield id(thing)

    assert len(list(drop())) <= 10
