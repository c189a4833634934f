"""Hooks of ours in the tables where torch keeps hooks: those of modules, optimizers, leaves, and of the whole process.

Torch numbers all hooks of a process from one count, and a pickled model has the numbers of its hooks in it. So ours
have numbers of their own, below zero: those of the program's hooks are what they would be without us.

They are kept out of whatever is made of a model: its pickles, its copies, and what ``torch.jit.script`` compiles. A
model is pickled with its tables of hooks, by their own class: so for as long as there are hooks of ours, ordered
dictionaries are pickled and copied without them. Of all others nothing changes, not a byte.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from retrograd.hooks.listeners import Patch, Undo, replace

SeeGradient = Callable[[Tensor], None]

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


def hooks_on(tensor: Tensor) -> Any:
    """The table of the hooks on a tensor."""
    table: Any = tensor._backward_hooks
    if table is None:
        tensor._backward_hooks = table = OrderedDict()
        node = tensor.grad_fn
        if node is not None:
            node._register_hook_dict(tensor)
    return table


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


_NAME = "create_script_module"


def _wrap_pickling() -> Undo:
    table = copyreg.dispatch_table
    original = table.get(OrderedDict)

    def reduce(table: OrderedDict[Any, Any]) -> Any:
        items = without_ours(table)
        if original is not None:
            return original(table if len(items) == len(table) else OrderedDict(items))
        make, arguments, state, elements, _ = cast("tuple[Any, ...]", table.__reduce__())
        return make, arguments, state, elements, iter(items)

    def undo() -> None:
        if table.get(OrderedDict) is not reduce:
            return  # somebody has put another one there since: leave theirs alone
        if original is None:
            del table[OrderedDict]
        else:
            table[OrderedDict] = original

    table[OrderedDict] = reduce
    return undo


def _wrap_scripting() -> Undo:
    room: Any = torch.jit._recursive
    original = getattr(room, _NAME)

    @functools.wraps(original)
    def create(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _hidden(model):
            return original(model, *args, **kwargs)

    return replace(room, _NAME, create)


@contextmanager
def _hidden(model: nn.Module) -> Iterator[None]:
    """Our hooks are taken out of a model meanwhile, and then every hook is back in its place."""
    tables = [table for module in model.modules() for table in (module._forward_hooks, module._forward_pre_hooks)]
    whole = [dict(table) for table in tables]
    for table in tables:
        for number in [number for number, hook in table.items() if is_ours(hook)]:
            del table[number]
    try:
        yield
    finally:
        for table, hooks in zip(tables, whole, strict=True):
            table.clear()
            table.update(hooks)


hidden_hooks = Patch(lambda: (_wrap_pickling(), _wrap_scripting()))
"""While somebody holds it, models are pickled, copied and scripted without our hooks."""
