"""A tap on the calls of all modules of the process, by torch's global module hooks."""

from __future__ import annotations

from typing import Any

from torch import nn

from retrograd.hooks.engine import is_compiling, uncompiled
from retrograd.hooks.module import InputWatcher, set_after_all, set_before_all


class EveryCallTap:
    """A pair of global hooks for one watcher; ``remove()`` takes both away."""

    __slots__ = ("_entries",)

    def __init__(self, watcher: InputWatcher) -> None:
        @uncompiled
        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            if not is_compiling():
                watcher.before_forward(module, args, {})

        @uncompiled
        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not is_compiling():
                watcher.after_call(module, output)

        self._entries = (set_before_all(before), set_after_all(after))

    def remove(self) -> None:
        """Take the hooks away."""
        for entry in self._entries:
            entry.remove()
