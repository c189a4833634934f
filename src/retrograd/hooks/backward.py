"""Where each backward pass begins and ends, and what it starts from.

``Tensor.backward`` looks ``torch.autograd.backward`` up when it is called, so wrapping that function and
``torch.autograd.grad`` sees every pass, but for code that bound one of them by name before. The wrappers stand
while somebody listens and are taken away after the last one. A pass inside a pass (reentrant checkpointing) is
part of the outer one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from retrograd.hooks.engine import current_graph_task, is_compiling


class BackwardListener(Protocol):
    """Told of each outermost backward pass, in the thread that asked for it. Must not raise."""

    def backward_begins(self, roots: tuple[torch.Tensor, ...]) -> None:
        """A pass starts from these tensors."""

    def backward_ends(self, failed: bool) -> None:
        """That pass has ended."""


class _Here(threading.local):
    inside = False
    """A pass that was told of runs in this thread. Told by us, since whoever wrapped our wrapper may still call it."""


_here = _Here()
_lock = threading.Lock()
_listeners: tuple[BackwardListener, ...] = ()
_originals: dict[str, Callable[..., Any]] = {}
_wrappers: dict[str, Callable[..., Any]] = {}


def listen_to_backward(listener: BackwardListener) -> None:
    """Tell this listener of every backward pass of the process."""
    global _listeners
    with _lock:
        if not _listeners:
            for name in ("backward", "grad"):
                _originals[name] = getattr(torch.autograd, name)
                _wrappers[name] = _wrap(_originals[name])
                setattr(torch.autograd, name, _wrappers[name])
        _listeners = (*_listeners, listener)


def unlisten_to_backward(listener: BackwardListener) -> None:
    """Stop telling this listener; with the last one torch's own functions are put back."""
    global _listeners
    with _lock:
        _listeners = tuple(other for other in _listeners if other is not listener)
        if not _listeners:
            for name, wrapper in _wrappers.items():
                if getattr(torch.autograd, name) is wrapper:  # else somebody wrapped it again: leave theirs alone
                    setattr(torch.autograd, name, _originals[name])
            _wrappers.clear()


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        listeners = _listeners
        if is_compiling() or not listeners or current_graph_task() != -1 or _here.inside:
            return original(*args, **kwargs)
        failed = True
        try:
            _here.inside = True
            roots = _roots(args, kwargs)
            for listener in listeners:
                listener.backward_begins(roots)
            del roots
            result = original(*args, **kwargs)
            failed = False
            return result
        finally:
            _here.inside = False
            for listener in listeners:
                listener.backward_ends(failed)

    return run


def _roots(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    given = args[0] if args else kwargs.get("tensors", kwargs.get("outputs", ()))
    if isinstance(given, torch.Tensor):
        return (given,)
    return tuple(item for item in given if isinstance(item, torch.Tensor)) if isinstance(given, (list, tuple)) else ()
