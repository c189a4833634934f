"""Keep our hooks out of whatever is made of a model: its pickles, its copies, and what ``torch.jit.script`` compiles.

A model is pickled with its tables of hooks, by their own class: so for as long as there are hooks of ours, ordered
dictionaries are pickled and copied without them. Of all others nothing changes, not a byte.
"""

from __future__ import annotations

import copyreg
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from retrograd.hooks.tables import is_ours, without_ours

_NAME = "create_script_module"

_lock = threading.Lock()
_wishes = 0
_undo: list[Callable[[], None]] = []


def hide_hooks() -> None:
    """From now on models are pickled, copied and scripted without our hooks."""
    global _wishes
    with _lock:
        _wishes += 1
        if not _undo:
            _undo.extend((_wrap_pickling(), _wrap_scripting()))


def show_hooks() -> None:
    """Take back one call of :func:`hide_hooks`; with the last one all is as it was."""
    global _wishes
    with _lock:
        _wishes -= 1
        while _undo and not _wishes:
            _undo.pop()()


def _wrap_pickling() -> Callable[[], None]:
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


def _wrap_scripting() -> Callable[[], None]:
    room: Any = torch.jit._recursive
    original = getattr(room, _NAME)

    @functools.wraps(original)
    def create(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _hidden(model):
            return original(model, *args, **kwargs)

    def undo() -> None:
        if getattr(room, _NAME) is create:
            setattr(room, _NAME, original)

    setattr(room, _NAME, create)
    return undo


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
