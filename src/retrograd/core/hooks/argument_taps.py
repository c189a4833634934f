"""Taps on what modules are called with: a pair of forward hooks a module, however many watch it.

The pair is removed with its last watcher; one that is part of a compiled graph stays, with nobody to tell.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

from torch import Tensor, nn

from retrograd.core.hooks import in_graphs
from retrograd.core.hooks.engine import is_compiling, uncompiled
from retrograd.core.hooks.in_graphs import TracedEntry, TracedTap
from retrograd.core.hooks.module import CompiledWatcher, EndHook, InputWatcher, ModuleTap, set_after, set_before
from retrograd.core.hooks.names import ArgumentNames
from retrograd.core.identities import IdentityDict


class ArgumentWatcher(CompiledWatcher, InputWatcher, Protocol):
    """Called before each call of a module, and after it; of a call inside compiled code once, with its arguments."""


class _ArgumentTap(ModuleTap[ArgumentWatcher]):
    __slots__ = ("_hooks",)

    def __init__(self, module: nn.Module) -> None:
        before, after = _Enter(self, ArgumentNames(module)), _Leave(self)
        self._hooks = weakref.ref(before), weakref.ref(after)  # which hold the tap, and are held by the module
        super().__init__()
        self.entries = (set_before(module, before), set_after(module, after, always=True))

    def take_handle(self, handle: Tensor) -> None:
        """Be known by this tensor; both hooks have it, too."""
        super().take_handle(handle)
        for find in self._hooks:
            hook = find()
            if hook is not None:
                hook.take_handle(handle)


class _Enter(TracedEntry):
    __slots__ = ("__weakref__", "tap")

    def __init__(self, tap: _ArgumentTap, names: ArgumentNames) -> None:
        self.tap = tap
        self.names = names
        self.handle = None

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_compiling():
            in_graphs.wing.trace_entry(self.handle, self.names.bind(args, kwargs))
            return
        for watcher in self.tap.watchers:
            watcher.before_forward(module, args, kwargs)


class _Leave(TracedTap, EndHook):
    __slots__ = ("__weakref__", "tap")

    operation = "exit"

    def __init__(self, tap: _ArgumentTap) -> None:
        self.tap = tap
        self.handle = None

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if is_compiling():
            in_graphs.wing.trace_exit(self.handle, output)
            return
        for watcher in self.tap.watchers:
            watcher.after_call(module, output)


_lock = threading.Lock()
_taps: IdentityDict[nn.Module, _ArgumentTap] = IdentityDict()


def watch_arguments(module: nn.Module, watcher: ArgumentWatcher) -> None:
    """Notify ``watcher`` before and after every call of ``module``, inside the hooks that the user has set so far."""
    with _lock:
        tap = _taps.get(module)
        if tap is None:
            tap = _taps[module] = _ArgumentTap(module)
        tap.watch((*tap.watchers, watcher))


def unwatch_arguments(module: nn.Module, watcher: ArgumentWatcher) -> None:
    """Take a watcher away, and the hooks with the last one."""
    with _lock:
        tap = _taps.get(module)
        if tap is not None and not tap.leave(watcher):
            del _taps[module]


def has_arguments_in_code(module: nn.Module) -> bool:
    """Return whether the tap on what a module is called with is part of compiled code."""
    tap = _taps.get(module)
    return tap is not None and tap.is_compiled
