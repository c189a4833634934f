"""Keep ``torch.jit.script`` from taking our hooks for a part of the model: it compiles every hook that it finds."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from retrograd.hooks.module import is_ours

_NAME = "create_script_module"

_lock = threading.Lock()
_wishes = 0
_undo: list[Callable[[], None]] = []


def hide_from_scripting() -> None:
    """From now on models are scripted without our hooks."""
    global _wishes
    with _lock:
        _wishes += 1
        if not _undo:
            _undo.append(_wrap_scripting())


def show_to_scripting() -> None:
    """Take back one call of :func:`hide_from_scripting`; with the last one torch's own function is put back."""
    global _wishes
    with _lock:
        _wishes -= 1
        while _undo and not _wishes:
            _undo.pop()()


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
