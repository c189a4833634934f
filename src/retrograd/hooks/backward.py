"""Where each backward pass begins and ends, and what it starts from.

``backward`` and ``grad`` in ``torch.autograd``, however a program got hold of them, call one function to run the
engine, which they look up in their module. A wrapper stands in its place while somebody listens, and is taken away
after the last one. The public functions themselves are left alone: torch.compile knows them by their identity.
A pass inside a pass (reentrant checkpointing) is part of the outer one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from retrograd.hooks.engine import current_graph_task, is_tracing, uncompiled, uncompiled_itself

_NAME = "_engine_run_backward"


class BackwardListener(Protocol):
    """Told of each outermost backward pass, in the thread that asked for it. Must not raise."""

    def backward_begins(self, roots: tuple[torch.Tensor, ...]) -> None:
        """A pass starts from these tensors."""

    def backward_ends(self, failed: bool) -> None:
        """That pass has ended."""


class _Here(threading.local):
    inside = False
    """A pass that was told of runs in this thread. Asked, for whoever wrapped our wrapper may still call it."""


_here = _Here()
_lock = threading.Lock()
_listeners: tuple[BackwardListener, ...] = ()
_undo: list[Callable[[], None]] = []


def listen_to_backward(listener: BackwardListener) -> None:
    """Tell this listener of every backward pass of the process."""
    global _listeners
    with _lock:
        if not _listeners:
            _undo.append(_wrap_engine())
        _listeners = (*_listeners, listener)


def unlisten_to_backward(listener: BackwardListener) -> None:
    """Stop telling this listener; with the last one torch's own function is put back."""
    global _listeners
    with _lock:
        _listeners = tuple(other for other in _listeners if other is not listener)
        while _undo and not _listeners:
            _undo.pop()()


def _wrap_engine() -> Callable[[], None]:
    original = getattr(torch.autograd, _NAME)

    @functools.wraps(original)
    @uncompiled_itself
    def run(roots: Any, *args: Any, **kwargs: Any) -> Any:
        listeners = _listeners
        if not listeners or _here.inside or current_graph_task() != -1 or is_tracing():
            return original(roots, *args, **kwargs)
        failed = True
        try:
            _here.inside = True
            _tell_begin(listeners, roots)
            result = original(roots, *args, **kwargs)
            failed = False
            return result
        finally:
            _here.inside = False
            _tell_end(listeners, failed)

    def undo() -> None:
        if getattr(torch.autograd, _NAME) is run:  # else somebody wrapped it again: leave theirs alone
            setattr(torch.autograd, _NAME, original)

    setattr(torch.autograd, _NAME, run)
    return undo


@uncompiled
def _tell_begin(listeners: tuple[BackwardListener, ...], roots: Any) -> None:
    tensors = tuple(root for root in roots if isinstance(root, torch.Tensor))
    for listener in listeners:
        listener.backward_begins(tensors)


@uncompiled
def _tell_end(listeners: tuple[BackwardListener, ...], failed: bool) -> None:
    for listener in listeners:
        listener.backward_ends(failed)
