"""Taps on modules: one forward hook a module, however many watch it; and behind a user's hooks those that rewrite.

Whoever set what, all that rewrites comes before all that reads.

The hook is removed with its last watcher.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor, nn
from torch.nn.modules import module as modules

from retrograd.core.hooks import in_graphs
from retrograd.core.hooks.compiled import keep_compiled_modules_quiet, tables_of
from retrograd.core.hooks.engine import is_compiling, uncompiled
from retrograd.core.hooks.in_graphs import TracedEntry, TracedHook, TracedTap, UntracedHook
from retrograd.core.hooks.listeners import TAP, Hook, HookEntry, SeeGradient, hidden_hooks, move_last
from retrograd.core.hooks.nested import Keys
from retrograd.core.hooks.parts import is_compiled
from retrograd.core.hooks.resting import TapSwitch, add_tap, change_taps, forget_switches
from retrograd.core.identities import IdentityDict


def set_before(module: nn.Module, hook: Hook, *, is_first: bool = False) -> HookEntry:
    """Call ``hook(module, args, kwargs)`` before each forward of a module."""
    tables = tables_of(module)  # of a scripted one, too, which refuses to be asked for hooks
    return HookEntry(hook, tables._forward_pre_hooks, marks=(tables._forward_pre_hooks_with_kwargs,), is_first=is_first)


def set_after(
    module: nn.Module, hook: Hook, *, with_kwargs: bool = False, always: bool = False, number: int | None = None
) -> HookEntry:
    """Call ``hook(module, args, [kwargs,] output)`` after each forward of a module.

    Args:
        module: the module.
        hook: what to call.
        with_kwargs: give it the keyword arguments.
        always: call it also after an exception, with None as the output.
        number: by which it is found, where that is the same for all.
    """
    tables = tables_of(module)
    marks = []
    if with_kwargs:
        marks.append(tables._forward_hooks_with_kwargs)
    if always:
        marks.append(tables._forward_hooks_always_called)
    return HookEntry(hook, tables._forward_hooks, marks=tuple(marks), number=number)


class CompiledWatcher(Protocol):
    """Notified of tensors inside compiled code while its switch (an attribute: nothing need be removed) is on."""

    @property
    def switch(self) -> TapSwitch:
        """Asked before each call."""

    def see_in_compiled_code(
        self, tensors: Sequence[tuple[Keys, Tensor]], trains: bool
    ) -> Sequence[SeeGradient | None]:
        """Receive the tensors of a call inside compiled code, where they have no graph.

        Args:
            tensors: its tensors, each with the keys that lead to it. Their memory is used again.
            trains: whether a backward pass may follow.

        Returns:
            The listener to the gradient of each; nothing at all if no gradient is wanted.
        """


AfterForward = Callable[[nn.Module, tuple[Any, ...], Any], None]


class ForwardWatcher(CompiledWatcher, Protocol):
    """Called after each forward of a module."""

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Receive what a module returned."""

    def after_compiled_call(self, rest: Sequence[tuple[Keys, Tensor]]) -> None:
        """Receive the other tensors of the last call, of which compiled code has shown some."""


class InputWatcher(Protocol):
    """Called before each forward of a module, and after it, also when it raised."""

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Receive what a module is called with."""

    def after_call(self, module: nn.Module, output: Any) -> None:
        """Called when the call has ended; ``output`` is None when it raised."""


Watcher = TypeVar("Watcher", bound=CompiledWatcher)


class Tap(TracedHook, Generic[Watcher]):
    """What compiled code hands tensors to, for all who watch them.

    Attributes:
        watchers: who watches.
        is_compiled: it is part of a graph that has run.
        entries: its hooks on a module.
    """

    __slots__ = ("__weakref__", "entries", "is_compiled", "watchers")

    def __init__(self) -> None:
        self.watchers: tuple[Watcher, ...] = ()
        self.entries: tuple[HookEntry, ...] = ()
        self.is_compiled = False
        self.handle = None
        in_graphs.expect_handle(self)
        add_tap(self)

    def watch(self, watchers: tuple[Watcher, ...]) -> None:
        """Have these watchers instead."""
        self.watchers = watchers
        forget_switches()
        in_graphs.wing.forget_run_ids()


class ModuleTap(Tap[Watcher]):
    """The tap behind the hooks on one module."""

    __slots__ = ("_is_hidden", "_release")

    def __init__(self) -> None:
        super().__init__()
        self._is_hidden = False
        self._release = in_graphs.hold_while_alive(in_graphs.tapped_calls, self)

    def leave(self, watcher: Watcher) -> bool:
        """Take a watcher away, and the hooks with the last one; returns whether they stay.

        Hooks that are part of a compiled graph stay, with nobody to tell: without them it would be compiled anew.
        """
        self.watch(tuple(other for other in self.watchers if other is not watcher))
        if not self.watchers and self.is_compiled:
            self._hide()
        elif not self.watchers:
            for entry in self.entries:
                entry.remove()
            self._release()
            return False
        return True

    def _hide(self) -> None:
        """Stay for as long as the module does, unseen by whoever copies it."""
        if not self._is_hidden:
            self._is_hidden = True
            in_graphs.hold_while_alive(hidden_hooks, self)


class ForwardTap(ModuleTap[ForwardWatcher], TracedTap):
    """The tap after the forwards of one module.

    Attributes:
        find_module: the module; None if it is gone.
        shown: for each thread what compiled code has shown of the call that is about to end.
    """

    __slots__ = ("_dispatch", "_of_wrappers", "find_module", "shown")

    operation = "tap"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.find_module = weakref.ref(module)
        self.shown: dict[int, Any] = {}
        self._dispatch: tuple[tuple[TapSwitch, AfterForward], ...] = ()
        self.entries = (set_after(module, self, number=TAP),)
        wrapped = getattr(module, "_orig_mod", None) if is_compiled(module) else None
        self._of_wrappers = in_graphs.load().join_wrapped(self, wrapped) if isinstance(wrapped, nn.Module) else None

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if is_compiling():
            in_graphs.wing.trace_tap(self.handle, output)
            return
        shown = self.shown.pop(threading.get_ident(), None) if self.shown else None
        rest = shown.rest_of(output) if shown is not None else None
        if rest is not None:
            self._tell_rest(rest)
            return
        for switch, see in self._dispatch:
            if switch.awake:
                see(module, args, output)

    def _tell_rest(self, rest: list[tuple[Keys, Tensor]]) -> None:
        for watcher in self.watchers:
            if rest and watcher.switch.awake:
                watcher.after_compiled_call(rest)

    def watch(self, watchers: tuple[ForwardWatcher, ...]) -> None:
        """Have these watchers instead."""
        super().watch(watchers)
        self._dispatch = tuple((each.switch, each.after_forward) for each in watchers)

    def leave(self, watcher: ForwardWatcher) -> bool:
        """Take a watcher away, and the hooks with the last one; returns whether they stay."""
        stays = super().leave(watcher)
        if not stays and self._of_wrappers is not None:
            self._of_wrappers.leave(self)
        return stays


_lock = threading.Lock()
_taps: IdentityDict[nn.Module, ForwardTap] = IdentityDict()


def watch_forward(module: nn.Module, watcher: ForwardWatcher) -> None:
    """Notify ``watcher`` after every forward of ``module``, behind the hooks that the user has set so far."""
    with _lock:
        change_taps()
        tap = _taps.get(module)
        if tap is None:
            tap = _taps[module] = ForwardTap(module)
        tap.watch((*tap.watchers, watcher))


def unwatch_forward(module: nn.Module, watcher: ForwardWatcher) -> None:
    """Take a watcher away, and the hook with the last one."""
    with _lock:
        change_taps()
        tap = _taps.get(module)
        if tap is not None and not tap.leave(watcher):
            del _taps[module]


def is_watched(module: nn.Module) -> bool:
    """Return whether anybody is notified of what a module returns."""
    return module in _taps


def has_output_in_code(module: nn.Module) -> bool:
    """Return whether the tap on what a module returns is part of compiled code."""
    tap = _taps.get(module)
    return tap is not None and tap.is_compiled


class CallTap:
    """A pair of hooks around the calls of one module, for one watcher; ``remove()`` takes both away.

    Of two taps the one that was set later begins and ends later; ``outermost`` makes it begin first.
    """

    __slots__ = ("_entries",)

    def __init__(self, module: nn.Module, watcher: InputWatcher, *, outermost: bool = False) -> None:
        self._entries = (
            set_before(module, _BeforeForward(watcher, is_outermost=outermost), is_first=outermost),
            set_after(module, _After(watcher), always=True),
        )

    def remove(self) -> None:
        """Take the hooks away."""
        for entry in self._entries:
            entry.remove()


class EndHook(Hook):
    """A hook after forwards that changes nothing, and comes after all that do."""

    __slots__ = ()


class _BeforeForward(UntracedHook):
    __slots__ = ("is_outermost", "watcher")

    def __init__(self, watcher: InputWatcher, *, is_outermost: bool) -> None:
        self.watcher = watcher
        self.is_outermost = is_outermost

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_compiling():
            self.watcher.before_forward(module, args, kwargs)


class _After(EndHook, UntracedHook):
    __slots__ = ("watcher",)

    def __init__(self, watcher: InputWatcher) -> None:
        self.watcher = watcher

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not is_compiling():
            self.watcher.after_call(module, output)


def put_readers_last(module: nn.Module) -> None:
    """Put all that reads behind the hooks that others have set on a module by now."""
    tables = tables_of(module)
    for hooks in (tables._forward_pre_hooks, tables._forward_hooks):
        for number, hook in list(hooks.items()):
            if _only_reads(hook):
                move_last(hooks, number)


def _only_reads(hook: object) -> bool:
    reads = isinstance(hook, (ForwardTap, EndHook, TracedEntry))
    return reads or (isinstance(hook, _BeforeForward) and not hook.is_outermost)


class ModuleHooks:
    """A pair of hooks on all modules, which can be out of the way for a while; ``remove()`` takes both away.

    Args:
        before: called as ``before(module, args)`` before each forward of any module, and before the module's own hooks.
        after: called as ``after(module, args, output)`` after each forward, also after an exception; left out, there is
            no such hook.
    """

    def __init__(self, before: Callable[..., None], after: Callable[..., None] | None = None) -> None:
        before_each, after_each = modules._global_forward_pre_hooks, modules._global_forward_hooks
        self._places: list[tuple[dict[int, Any], int, Any]] = [
            (before_each, HookEntry(before, before_each).number, before)
        ]
        if after is not None:
            always = modules._global_forward_hooks_always_called
            number = HookEntry(after, after_each, marks=(always,)).number
            self._places += [(always, number, after), (after_each, number, after)]
        self._undo_quiet = keep_compiled_modules_quiet(*{number for _, number, _ in self._places})
        self._pauses = 0
        self._is_removed = False
        self._lock = threading.Lock()

    def pause(self) -> None:
        """Take them out of torch's tables until :meth:`resume`."""
        with self._lock:
            self._pauses += 1
            self._take_out()

    def resume(self) -> None:
        """Take back one call of :meth:`pause`."""
        with self._lock:
            self._pauses -= 1
            if not self._pauses and not self._is_removed:
                for table, number, hook in self._places:
                    table[number] = hook

    def remove(self) -> None:
        """Take them away for good. May be called twice."""
        with self._lock:
            if not self._is_removed:
                self._is_removed = True
                self._take_out()
                self._undo_quiet()

    def _take_out(self) -> None:
        for table, number, _ in self._places:
            table.pop(number, None)


def hook_every_call(watcher: InputWatcher) -> ModuleHooks:
    """Notify a watcher before and after each call of any module."""

    @uncompiled
    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        if not is_compiling():
            watcher.before_forward(module, args, {})

    @uncompiled
    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not is_compiling():
            watcher.after_call(module, output)

    return ModuleHooks(before, after)
