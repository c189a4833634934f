"""Taps on modules: one forward hook a module, however many watch it; and behind a user's hooks those that rewrite.

Whoever set what, all that rewrites comes before all that reads.

The hook is removed with its last watcher. Models are copied and pickled with their hooks in place; the copies get
a callable of the standard library that does nothing, so that a checkpoint never needs this package to be loaded.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.hooks import RemovableHandle

from retrograd.hooks.engine import is_compiling, uncompiled

F = TypeVar("F", bound=Callable[..., Any])


class Switch(Protocol):
    """Says whether taps have anything to do."""

    awake: bool


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of this module run as compiled code, so that hooks on the modules within it do not."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


class ForwardWatcher(Protocol):
    """Told after each forward of a module, while its switch is on: an attribute, so that nothing need be removed."""

    @property
    def switch(self) -> Switch:
        """Asked before each call."""

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """See what a module returned."""


class InputWatcher(Protocol):
    """Told before each forward of a module, and after it, also when it raised."""

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See what a module is called with."""

    def after_call(self, module: nn.Module, output: Any) -> None:
        """See that the call ended; ``output`` is None when it raised."""


class _Inert:
    """A hook that is neither copied nor pickled: its copy is ``nullcontext().__exit__``, which does nothing."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__


def is_ours(hook: object) -> bool:
    """Whether a module's hook was set here."""
    return isinstance(hook, _Inert)


class _ForwardTap(_Inert):
    __slots__ = ("handle", "watchers")

    def __init__(self, module: nn.Module) -> None:
        self.watchers: tuple[ForwardWatcher, ...] = ()
        self.handle: RemovableHandle = nn.Module.register_forward_hook(module, self)  # scripted ones refuse to be asked

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if is_compiling():
            return
        for watcher in self.watchers:
            if watcher.switch.awake:
                watcher.after_forward(module, args, output)


_lock = threading.Lock()
_taps: WeakKeyDictionary[nn.Module, _ForwardTap] = WeakKeyDictionary()


def watch_forward(module: nn.Module, watcher: ForwardWatcher) -> None:
    """Tell ``watcher`` after every forward of ``module``, behind the hooks that the user has set so far."""
    with _lock:
        tap = _taps.get(module)
        if tap is None:
            tap = _taps[module] = _ForwardTap(module)
        tap.watchers = (*tap.watchers, watcher)


def unwatch_forward(module: nn.Module, watcher: ForwardWatcher) -> None:
    """Take a watcher away, and the hook with the last one."""
    with _lock:
        tap = _taps.get(module)
        if tap is None:
            return
        tap.watchers = tuple(other for other in tap.watchers if other is not watcher)
        if not tap.watchers:
            tap.handle.remove()
            del _taps[module]


class CallTap(_Inert):
    """A pair of hooks around the calls of one module, for one watcher; ``remove()`` takes both away.

    Of two taps the one that was set later begins and ends later; ``outermost`` makes it begin first.
    """

    __slots__ = ("_handles", "_watcher")

    def __init__(self, module: nn.Module, watcher: InputWatcher, *, outermost: bool = False) -> None:
        self._watcher = watcher
        self._handles = (
            nn.Module.register_forward_pre_hook(
                module, _Before(watcher, is_outermost=outermost), with_kwargs=True, prepend=outermost
            ),
            nn.Module.register_forward_hook(module, _After(watcher), always_call=True),
        )

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


class _Before(_Inert):
    __slots__ = ("is_outermost", "watcher")

    def __init__(self, watcher: InputWatcher, *, is_outermost: bool) -> None:
        self.watcher = watcher
        self.is_outermost = is_outermost

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_compiling():
            self.watcher.before_forward(module, args, kwargs)


class _After(_Inert):
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


class OutputTap(_Inert):
    """The hook behind the calls of one module for one rewriter; ``remove()`` takes it away.

    It comes behind the hooks that the user has set so far, and before all that read.
    """

    __slots__ = ("_handle",)

    def __init__(self, module: nn.Module, rewriter: OutputRewriter) -> None:
        self._handle = nn.Module.register_forward_hook(module, _RewriteOutput(rewriter), with_kwargs=True)
        _put_readers_last(module)

    def remove(self) -> None:
        """Take the hook away."""
        self._handle.remove()


class InputTap(_Inert):
    """The hooks around the calls of one module for one rewriter; ``remove()`` takes them away.

    They come behind the hooks that the user has set so far, and before all that read.
    """

    __slots__ = ("_handles",)

    def __init__(self, module: nn.Module, rewriter: InputRewriter) -> None:
        self._handles = (
            nn.Module.register_forward_pre_hook(module, _RewriteInput(rewriter), with_kwargs=True),
            nn.Module.register_forward_hook(module, _EndCall(rewriter), always_call=True),
        )
        _put_readers_last(module)

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


def _put_readers_last(module: nn.Module) -> None:
    tables: tuple[Any, ...] = (module._forward_pre_hooks, module._forward_hooks)
    for hooks in tables:
        for number, hook in list(hooks.items()):
            if _only_reads(hook):
                hooks.move_to_end(number)


def _only_reads(hook: object) -> bool:
    return isinstance(hook, (_ForwardTap, _After)) or (isinstance(hook, _Before) and not hook.is_outermost)


def _breaks_graph(call: F) -> F:
    """Decorator for hooks that torch.compile must call as they are, between two graphs: a rule has a memory."""
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = "a rule of retrograd acts here, and it has a memory"  # type: ignore[attr-defined]
    return call


class _RewriteOutput(_Inert):
    __slots__ = ("_rewrite",)

    def __init__(self, rewriter: OutputRewriter) -> None:
        self._rewrite = rewriter.rewrite_output

    @_breaks_graph
    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        return self._rewrite(module, args, kwargs, output)


class _RewriteInput(_Inert):
    __slots__ = ("_rewrite",)

    def __init__(self, rewriter: InputRewriter) -> None:
        self._rewrite = rewriter.rewrite_input

    @_breaks_graph
    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._rewrite(module, args, kwargs)


class _EndCall(_Inert):
    __slots__ = ("_end",)

    def __init__(self, rewriter: InputRewriter) -> None:
        self._end = rewriter.end_call

    @_breaks_graph
    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._end(module, output)
