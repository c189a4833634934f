"""Hooks that read what modules take and return, while one forward runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from retrograd.hooks.arguments import ArgumentNames
from retrograd.hooks.engine import current_graph_task, is_compiling, uncompiled
from retrograd.hooks.module import set_after, set_before
from retrograd.hooks.tables import Hook, hidden_hooks


@dataclass(frozen=True, slots=True)
class Reading:
    """What is to be read of one module.

    Attributes:
        tapped: the module that gets the hooks.
        module: the module whose arguments have the names; another one where ``tapped`` is a wrapper.
        see_arguments: told of the arguments of each call, by their names, before the module can overwrite them.
        see_output: told of what each call returns.
    """

    tapped: nn.Module
    module: nn.Module
    see_arguments: Callable[[dict[str, Any]], None] | None = None
    see_output: Callable[[Any], None] | None = None


@contextlib.contextmanager
def read_calls(readings: Iterable[Reading]) -> Iterator[None]:
    """Read while the block runs, behind all hooks that are there: calls of this thread that are no recomputation."""
    entries = []
    here = _OnePlace()
    hidden_hooks.hold()
    try:
        for each in readings:
            if each.see_arguments is not None:
                before = _BeforeRead(each.module, each.see_arguments, here)
                entries.append(set_before(each.tapped, before))
            if each.see_output is not None:
                entries.append(set_after(each.tapped, _After(each.see_output, here)))
        yield
    finally:
        for entry in entries:
            entry.remove()
        hidden_hooks.release()


class _OnePlace:
    """The thread and the backward pass, if any, in which the forward was begun."""

    __slots__ = ("_task", "_thread")

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._task = current_graph_task()

    @uncompiled
    def is_here(self) -> bool:
        return threading.get_ident() == self._thread and current_graph_task() == self._task


class _BeforeRead(Hook):
    __slots__ = ("_here", "_names", "_see")

    def __init__(self, module: nn.Module, see: Callable[[dict[str, Any]], None], here: _OnePlace) -> None:
        self._names = ArgumentNames(module)
        self._see = see
        self._here = here

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_compiling() or not self._here.is_here():
            return
        self._see(self._names.bind(args, kwargs))


class _After(Hook):
    __slots__ = ("_here", "_see")

    def __init__(self, see: Callable[[Any], None], here: _OnePlace) -> None:
        self._see = see
        self._here = here

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not is_compiling() and self._here.is_here():
            self._see(output)
