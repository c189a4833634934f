"""Where the threads of a program begin and end.

All of them, those of pools and of subclasses too, run through one method of ``threading.Thread``. A wrapper stands in
its place while somebody listens.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from retrograd.hooks.engine import uncompiled_itself

_NAME = "_bootstrap_inner"


class ThreadListener(Protocol):
    """Told of threads, within them. Must not raise."""

    def thread_begins(self) -> None:
        """This thread is about to do its work."""

    def thread_ends(self) -> None:
        """It has done it; told too if it listens no longer, as long as somebody holds the listener."""


_lock = threading.Lock()
_listeners: tuple[ThreadListener, ...] = ()
_undo: list[Callable[[], None]] = []


def listen_to_threads(listener: ThreadListener) -> None:
    """Tell this listener of threads that begin from now on."""
    global _listeners
    with _lock:
        _listeners = (*_listeners, listener)
        if not _undo:
            _undo.append(_wrap())


def unlisten_to_threads(listener: ThreadListener) -> None:
    """Stop telling this listener; with the last one the method is put back."""
    global _listeners
    with _lock:
        _listeners = tuple(other for other in _listeners if other is not listener)
        while _undo and not _listeners:
            _undo.pop()()


def _begin() -> tuple[ThreadListener, ...]:
    listeners = _listeners
    for listener in listeners:
        listener.thread_begins()
    return listeners


def _wrap() -> Callable[[], None]:
    original = getattr(threading.Thread, _NAME)

    @functools.wraps(original)
    @uncompiled_itself
    def run(self: threading.Thread) -> Any:
        told = [weakref.ref(listener) for listener in _begin()]
        try:
            return original(self)
        finally:
            for held in told:
                listener = held()
                if listener is not None:
                    listener.thread_ends()

    def undo() -> None:
        if getattr(threading.Thread, _NAME) is run:  # else somebody wrapped it again: leave theirs alone
            setattr(threading.Thread, _NAME, original)

    setattr(threading.Thread, _NAME, run)
    return undo
