"""Where each backward pass begins and ends, and what it starts from.

``Tensor.backward`` looks ``torch.autograd.backward`` up when it is called, so wrapping that function and
``torch.autograd.grad`` sees every pass, but for code that bound one of them by name before. The wrappers stand
while somebody listens and are taken away after the last one. A pass inside a pass (reentrant checkpointing) is
part of the outer one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from retrograd.hooks.engine import current_graph_task, is_compiling


class BackwardListener(Protocol):
    """Told of each outermost backward pass, in the thread that asked for it."""

    def backward_begins(self, roots: tuple[torch.Tensor, ...]) -> None:
        """A pass starts from these tensors."""

    def backward_ends(self, failed: bool) -> None:
        """That pass has ended."""


_listeners: tuple[BackwardListener, ...] = ()
_originals: dict[str, Callable[..., Any]] = {}
_wrappers: dict[str, Callable[..., Any]] = {}


def listen_to_backward(listener: BackwardListener) -> None:
    """Tell this listener of every backward pass of the process."""
    global _listeners
    if not _listeners:
        for name in ("backward", "grad"):
            _originals[name] = getattr(torch.autograd, name)
            _wrappers[name] = _wrap(_originals[name])
            setattr(torch.autograd, name, _wrappers[name])
    _listeners = (*_listeners, listener)


def unlisten_to_backward(listener: BackwardListener) -> None:
    """Stop telling this listener; with the last one torch's own functions are put back."""
    global _listeners
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
        if is_compiling() or not listeners or current_graph_task() != -1:
            return original(*args, **kwargs)
        roots = _roots(args, kwargs)
        for listener in listeners:
            listener.backward_begins(roots)
        del roots
        failed = True
        try:
            result = original(*args, **kwargs)
            failed = False
            return result
        finally:
            for listener in listeners:
                listener.backward_ends(failed)

    return run


def _roots(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    given = args[0] if args else kwargs.get("tensors", kwargs.get("outputs", ()))
    if isinstance(given, torch.Tensor):
        return (given,)
    return tuple(item for item in given if isinstance(item, torch.Tensor)) if isinstance(given, (list, tuple)) else ()
