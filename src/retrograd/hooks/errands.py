"""What only the thread concerned can do: it does so before it next calls a module, or compiled code.

Torch's modes belong to a thread, and nobody else can take them off.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn

from retrograd.hooks.compiled import compiled_call_listeners
from retrograd.hooks.engine import uncompiled
from retrograd.hooks.module import EveryCallTap

Errand = Callable[[], None]


class _Errands:
    """Those of all threads. While there are none nothing is hooked."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Errand, ...]] = {}
        self._undo: list[Errand] = []
        self._lock = threading.RLock()

    def add(self, thread: int, errand: Errand) -> None:
        with self._lock:
            self._waiting[thread] = (*self._waiting.get(thread, ()), errand)
            if not self._undo:
                compiled_call_listeners.add(self)
                self._undo = [EveryCallTap(self).remove, lambda: compiled_call_listeners.remove(self)]

    @uncompiled
    def run(self) -> None:
        """Those of this thread."""
        with self._lock:
            errands = self._waiting.pop(threading.get_ident(), ())
        for errand in errands:
            errand()
        with self._lock:
            alive = set(sys._current_frames())  # the dict itself has this very frame in it: a cycle
            self._waiting = {thread: errands for thread, errands in self._waiting.items() if thread in alive}
            while self._undo and not self._waiting:
                self._undo.pop()()

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.run()

    def after_call(self, module: nn.Module, output: Any) -> None:
        pass

    def compiled_call_begins(self, function: object, frame: FrameType) -> None:
        self.run()

    def compiled_call_ends(self) -> None:
        pass


_errands = _Errands()


def before_next_call(thread: int, errand: Errand) -> None:
    """Have a thread do this, once."""
    _errands.add(thread, errand)


def run_errands() -> None:
    """Do what this thread was to do: it ends."""
    _errands.run()
