"""Taps on modules: one forward hook a module, however many watch it; and behind a user's hooks those that rewrite.

Whoever set what, all that rewrites comes before all that reads.

The hook is removed with its last watcher.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn.modules import module as modules

from retrograd.hooks.compiled import has_been_compiled, tables_of
from retrograd.hooks.compiled_taps import NOBODY, Told, make_handle, make_ticket, name_tensors, trace_tap
from retrograd.hooks.engine import is_compiling, uncompiled
from retrograd.hooks.nested import Keys
from retrograd.hooks.tables import Entry, Hook, SeeGradient

F = TypeVar("F", bound=Callable[..., Any])


class TapSwitch(Protocol):
    """Says whether taps have anything to do."""

    awake: bool


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of this module run as compiled code, so that hooks on the modules within it do not."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def set_before(module: nn.Module, hook: Hook, *, is_first: bool = False) -> Entry:
    """Call ``hook(module, args, kwargs)`` before each forward of a module."""
    tables = tables_of(module)  # of a scripted one, too, which refuses to be asked for hooks
    return Entry(hook, tables._forward_pre_hooks, marks=(tables._forward_pre_hooks_with_kwargs,), is_first=is_first)


def set_after(module: nn.Module, hook: Hook, *, with_kwargs: bool = False, always: bool = False) -> Entry:
    """Call ``hook(module, args, [kwargs,] output)`` after each forward of a module.

    Args:
        module: the module.
        hook: what to call.
        with_kwargs: give it the keyword arguments.
        always: call it also after an exception, with None as the output.
    """
    tables = tables_of(module)
    marks = []
    if with_kwargs:
        marks.append(tables._forward_hooks_with_kwargs)
    if always:
        marks.append(tables._forward_hooks_always_called)
    return Entry(hook, tables._forward_hooks, marks=tuple(marks))


def set_before_all(hook: Callable[..., None]) -> Entry:
    """Call ``hook(module, args)`` before each forward of any module, and before the module's own hooks."""
    return Entry(hook, modules._global_forward_pre_hooks)


def set_after_all(hook: Callable[..., None]) -> Entry:
    """Call ``hook(module, args, output)`` after each forward of any module, also after an exception."""
    return Entry(hook, modules._global_forward_hooks, marks=(modules._global_forward_hooks_always_called,))


class ForwardWatcher(Protocol):
    """Told after each forward of a module, while its switch is on: an attribute, so that nothing need be removed."""

    @property
    def switch(self) -> TapSwitch:
        """Asked before each call."""

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """See what a module returned."""

    def after_compiled_forward(
        self, tensors: Sequence[tuple[Keys, Tensor]], trains: bool
    ) -> Sequence[SeeGradient | None]:
        """See what a module returned inside compiled code, where tensors have no graph.

        Args:
            tensors: its tensors, each with the keys that lead to it. Their memory is used again.
            trains: whether a backward pass may follow.

        Returns:
            What is told of the gradient of each; nothing at all if no gradient is wanted.
        """


class InputWatcher(Protocol):
    """Told before each forward of a module, and after it, also when it raised."""

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See what a module is called with."""

    def after_call(self, module: nn.Module, output: Any) -> None:
        """See that the call ended; ``output`` is None when it raised."""


class _ForwardTap(Hook):
    __slots__ = ("__weakref__", "_tickets", "entry", "handle", "is_compiled", "watchers")

    def __init__(self, module: nn.Module) -> None:
        self.watchers: tuple[ForwardWatcher, ...] = ()
        self.handle = make_handle(self)
        self.is_compiled = False
        self._tickets: dict[Told, Tensor] = {}
        self.entry = set_after(module, self)

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if is_compiling():
            trace_tap(self.handle, output)
            return
        for watcher in self.watchers:
            if watcher.switch.awake:
                watcher.after_forward(module, args, output)

    def see_compiled(self, tensors: Sequence[Tensor], names: Sequence[str], trains: bool) -> Tensor:
        """Tell the watchers of a call inside compiled code; returns its ticket."""
        self.is_compiled = True
        told = []
        for watcher in self.watchers:
            if watcher.switch.awake:
                see = watcher.after_compiled_forward(name_tensors(tensors, names), trains)
                if see:
                    told.append(see)
        return self._find_ticket(told) if told else NOBODY

    def _find_ticket(self, told: Sequence[Sequence[SeeGradient | None]]) -> Tensor:
        by_tensor = tuple(tuple(see for see in each if see is not None) for each in zip(*told, strict=True))
        ticket = self._tickets.get(by_tensor)
        if ticket is None:
            ticket = self._tickets[by_tensor] = make_ticket(by_tensor)
        return ticket

    def watch(self, watchers: tuple[ForwardWatcher, ...]) -> None:
        """Have these watchers instead, and new tickets."""
        self.watchers = watchers
        self._tickets.clear()


_lock = threading.Lock()
_taps: WeakKeyDictionary[nn.Module, _ForwardTap] = WeakKeyDictionary()


def watch_forward(module: nn.Module, watcher: ForwardWatcher) -> None:
    """Tell ``watcher`` after every forward of ``module``, behind the hooks that the user has set so far."""
    with _lock:
        tap = _taps.get(module)
        if tap is None:
            tap = _taps[module] = _ForwardTap(module)
        tap.watch((*tap.watchers, watcher))


def unwatch_forward(module: nn.Module, watcher: ForwardWatcher) -> None:
    """Take a watcher away, and the hook with the last one.

    A hook that is part of a compiled graph stays, with nobody to tell: without it the graph would be compiled anew.
    """
    with _lock:
        tap = _taps.get(module)
        if tap is None:
            return
        tap.watch(tuple(other for other in tap.watchers if other is not watcher))
        if not tap.watchers and not tap.is_compiled:
            tap.entry.remove()
            del _taps[module]


def is_late(module: nn.Module) -> bool:
    """Whether this module runs in code that was compiled without a tap of ours on it."""
    tap = _taps.get(module)
    return has_been_compiled(module) and not (tap is not None and tap.is_compiled)


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


class _BeforeForward(Hook):
    __slots__ = ("is_outermost", "watcher")

    def __init__(self, watcher: InputWatcher, *, is_outermost: bool) -> None:
        self.watcher = watcher
        self.is_outermost = is_outermost

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_compiling():
            self.watcher.before_forward(module, args, kwargs)


class _After(Hook):
    __slots__ = ("watcher",)

    def __init__(self, watcher: InputWatcher) -> None:
        self.watcher = watcher

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not is_compiling():
            self.watcher.after_call(module, output)


class OutputRewriter(Protocol):
    """Asked after each forward of a module what it shall return."""

    def rewrite_output(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """What takes the place of ``output``."""


class InputRewriter(Protocol):
    """Asked before each forward of a module what it shall be called with."""

    def rewrite_input(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that take the place of these."""

    def end_call(self, module: nn.Module, output: Any) -> None:
        """See that the call ended; ``output`` is None when it raised."""


class OutputTap:
    """The hook behind the calls of one module for one rewriter; ``remove()`` takes it away.

    It comes behind the hooks that the user has set so far, and before all that read.
    """

    __slots__ = ("_entry",)

    def __init__(self, module: nn.Module, rewriter: OutputRewriter) -> None:
        self._entry = set_after(module, _RewriteOutput(rewriter), with_kwargs=True)
        _put_readers_last(module)

    def remove(self) -> None:
        """Take the hook away."""
        self._entry.remove()


class InputTap:
    """The hooks around the calls of one module for one rewriter; ``remove()`` takes them away.

    They come behind the hooks that the user has set so far, and before all that read.
    """

    __slots__ = ("_entries",)

    def __init__(self, module: nn.Module, rewriter: InputRewriter) -> None:
        self._entries = (
            set_before(module, _RewriteInput(rewriter)),
            set_after(module, _EndCall(rewriter), always=True),
        )
        _put_readers_last(module)

    def remove(self) -> None:
        """Take the hooks away."""
        for entry in self._entries:
            entry.remove()


def _put_readers_last(module: nn.Module) -> None:
    tables = tables_of(module)
    for hooks in (tables._forward_pre_hooks, tables._forward_hooks):
        for number, hook in list(hooks.items()):
            if _only_reads(hook):
                hooks.move_to_end(number)


def _only_reads(hook: object) -> bool:
    return isinstance(hook, (_ForwardTap, _After)) or (isinstance(hook, _BeforeForward) and not hook.is_outermost)


def _breaks_graph(call: F) -> F:
    """Decorator for hooks that torch.compile must call as they are, between two graphs: a rule has a memory."""
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = "a rule of retrograd acts here, and it has a memory"  # type: ignore[attr-defined]
    return call


class _RewriteOutput(Hook):
    __slots__ = ("_rewrite",)

    def __init__(self, rewriter: OutputRewriter) -> None:
        self._rewrite = rewriter.rewrite_output

    @_breaks_graph
    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        return self._rewrite(module, args, kwargs, output)


class _RewriteInput(Hook):
    __slots__ = ("_rewrite",)

    def __init__(self, rewriter: InputRewriter) -> None:
        self._rewrite = rewriter.rewrite_input

    @_breaks_graph
    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._rewrite(module, args, kwargs)


class _EndCall(Hook):
    __slots__ = ("_end",)

    def __init__(self, rewriter: InputRewriter) -> None:
        self._end = rewriter.end_call

    @_breaks_graph
    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._end(module, output)


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
