"""Hooks of ours in the tables where torch keeps hooks: those of modules, optimizers, leaves, and of the whole process.

Torch numbers all hooks of a process from one count, and a pickled model has the numbers of its hooks in it. So ours
have numbers of their own, below zero: those of the program's hooks are what they would be without us.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

_numbers = itertools.count(-1, -1)


class Hook:
    """A hook of ours on a module or an optimizer.

    Where it is copied or pickled all the same, because somebody keeps hooks elsewhere than torch does, its copy is
    ``nullcontext().__exit__``, which does nothing and does not need this package.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__


def is_ours(hook: object) -> bool:
    """Whether a hook in a table of torch's was set here."""
    return isinstance(hook, Hook)


class Entry:
    """One hook in a table of torch's, from now until ``remove()``. It does not hold the table.

    Args:
        hook: what torch is to call.
        table: where torch looks for it.
        marks: tables in which torch looks up how to call it: with keyword arguments, or also after an exception. It
            asks for the number alone, so that the hook itself can stand there, and is told for one of ours.
        is_first: whether it comes before the hooks that are there.

    Attributes:
        number: by which it stands in these tables.
    """

    __slots__ = ("_tables", "number")

    def __init__(
        self, hook: Any, table: dict[int, Any], marks: tuple[dict[int, Any], ...] = (), *, is_first: bool = False
    ) -> None:
        self.number = next(_numbers)
        tables = (*marks, table)  # called only once it is known how
        for each in tables:
            each[self.number] = hook
        if is_first:
            table.move_to_end(self.number, last=False)  # type: ignore[attr-defined]
        self._tables = tuple(weakref.ref(each) for each in reversed(tables))

    def remove(self) -> None:
        """Take it away. May be called twice."""
        for find in self._tables:
            table = find()
            if table is not None:
                table.pop(self.number, None)


def enter_node(register: Callable[[Any], Any], hook: Callable[..., Any]) -> Entry:
    """Set a hook on a node of a graph, whose tables nobody but torch finds.

    Args:
        register: the node's ``register_hook`` or ``register_prehook``.
        hook: what torch is to call.
    """
    handle: RemovableHandle = register(hook)
    table = handle.hooks_dict_ref()
    assert table is not None
    entry = Entry(hook, table)
    del table[handle.id]
    if RemovableHandle.next_id == handle.id + 1:  # give the number back, unless another thread has counted on
        RemovableHandle.next_id = handle.id
    return entry


def without_ours(table: OrderedDict[Any, Any]) -> list[tuple[Any, Any]]:
    """What stands in a table, but for the hooks that were set here."""
    return [item for item in list(table.items()) if not isinstance(item[1], Hook)]
