"""Keep our hooks out of whatever is made of a model: its pickles, its copies, and what ``torch.jit.script`` compiles.

A model is pickled with its tables of hooks, by their own class: so for as long as there are hooks of ours, ordered
dictionaries are pickled and copied without them. Of all others nothing changes, not a byte.
"""

from __future__ import annotations

import copyreg
import functools
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from retrograd.hooks.patches import Patch, Undo, replace
from retrograd.hooks.tables import is_ours, without_ours

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
