"""Where the threads of a program begin and end.

All of them, those of pools and of subclasses too, run through one method of ``threading.Thread``. A wrapper stands in
its place while somebody listens.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any, Protocol

from retrograd.hooks.engine import uncompiled_itself
from retrograd.hooks.listeners import Listeners
from retrograd.hooks.patches import Patch, Undo, replace

_NAME = "_bootstrap_inner"


class ThreadListener(Protocol):
    """Told of threads, within them. Must not raise."""

    def thread_begins(self) -> None:
        """This thread is about to do its work."""

    def thread_ends(self) -> None:
        """It has done it; told too if it listens no longer, as long as somebody holds the listener."""


def _begin() -> tuple[ThreadListener, ...]:
    listeners = thread_listeners.all
    for listener in listeners:
        listener.thread_begins()
    return listeners


def _wrap() -> list[Undo]:
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

    setattr(threading.Thread, _NAME, original)

    return [replace(threading.Thread, _NAME, run)]


thread_listeners = Listeners[ThreadListener](Patch(_wrap))
