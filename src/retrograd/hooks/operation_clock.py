"""How long each operation of the forward takes, and when the nodes that it made were made.

The clock is read around every operation that makes nodes. Compiled code counts as one operation.
"""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_right
from operator import itemgetter
from types import FrameType
from typing import Any

import torch

from retrograd.hooks.calls import OUTSIDE
from retrograd.hooks.compiled import compiled_call_listeners
from retrograd.hooks.engine import current_graph_task, next_sequence_number, uncompiled
from retrograd.hooks.function_mode import FunctionListener

_PASSES = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})
"""No operations: what is made while they run is made by checkpoints and double backward."""

_first = itemgetter(0)
_now = time.perf_counter_ns

TimedOperation = tuple[int, int, int, int]
"""First number and the one after the last of the nodes it made; begin and end, by ``time.perf_counter_ns``."""


_Begun = tuple[Any, int, int]
"""An event of the device, the number of the next node, and the time, as an operation begins."""


class OperationClock(FunctionListener):
    """Times the operations of the thread that starts it; on a GPU how long they run there, as its events tell."""

    def __init__(self) -> None:
        self._thread = 0
        self._compiled: _Begun | None = None
        self._operations: list[TimedOperation] = []
        self._events: list[tuple[Any, Any]] | None = [] if torch.cuda.is_available() else None
        self._spans: list[int] = []

    def seconds_at(self, number: int) -> float | None:
        """How long the operation took that made the node with this number; it may have made several."""
        index = bisect_right(self._operations, number, key=_first) - 1
        if index < 0 or not self._operations[index][0] <= number < self._operations[index][1]:
            return None
        _, _, begin, end = self._operations[index]
        return self._spans[index] / 1e9 if self._spans else (end - begin) / 1e9

    def read_device(self) -> None:
        """Wait for the device and read what was measured on it."""
        if self._events:
            torch.cuda.synchronize()
            self._spans = [int(begin.elapsed_time(end) * 1e6) for begin, end in self._events]
            self._events.clear()

    @property
    def ends(self) -> list[tuple[int, int]]:
        """For each operation the number after those of its nodes, and when it had ended."""
        return [(last, end) for _, last, _, end in self._operations]

    def start(self) -> None:
        """Time this thread from now on."""
        self._thread = threading.get_ident()
        compiled_call_listeners.add(self)

    def stop(self) -> None:
        """Time nothing more."""
        self._thread = 0
        compiled_call_listeners.remove(self)

    @uncompiled
    def before(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> _Begun | None:
        """Read the clock."""
        if threading.get_ident() != self._thread or current_graph_task() != OUTSIDE:
            return None
        return self._begin()

    @uncompiled
    def after(self, begun: _Begun, function: Any, result: Any, frame: FrameType) -> None:
        """Note the time if nodes were made."""
        end, (mark, first, begin), last = _now(), begun, next_sequence_number()
        if last != first and function not in _PASSES:
            self._operations.append((first, last, begin, end))
            if self._events is not None:
                self._events.append((mark, _mark()))

    @uncompiled
    def compiled_call_begins(self, function: object, frame: FrameType) -> None:
        """Compiled code begins."""
        if threading.get_ident() == self._thread:
            self._compiled = self._begin()

    @uncompiled
    def compiled_call_ends(self) -> None:
        """It has ended."""
        if self._compiled is not None and threading.get_ident() == self._thread:
            begun, self._compiled = self._compiled, None
            self.after(begun, None, None, sys._getframe())

    def _begin(self) -> _Begun:
        return _mark() if self._events is not None else None, next_sequence_number(), _now()


def _mark() -> Any:
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark
