"""How long each operation of the forward takes, and when the nodes that it made were made.

A function mode reads the clock around every operation that makes nodes. Compiled code is left alone, and counts as one
operation. Some modules compute by other kernels where a function mode is on; it is not on while they run.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_right
from operator import itemgetter
from typing import Any

import torch

from retrograd.hooks.engine import next_sequence_number, uncompiled_itself
from retrograd.hooks.quiet_mode import QuietMode

_PASSES = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})
"""No operations: what is made while they run is made by checkpoints and double backward."""

_first = itemgetter(0)
_now = time.perf_counter_ns

TimedOperation = tuple[int, int, int, int]
"""First number and the one after the last of the nodes it made; begin and end, by ``time.perf_counter_ns``."""


class OperationClock(QuietMode):
    """Times the operations of the thread that starts it; on a GPU how long they run there, as its events tell."""

    def __init__(self) -> None:
        super().__init__()
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

    @uncompiled_itself
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_started:  # stopped, and not yet taken off
            return function(*args, **kwargs) if kwargs else function(*args)
        events = self._events
        mark = _mark() if events is not None else None
        call = self.frames.find(sys._getframe(1), function)
        first, begin = next_sequence_number(), _now()
        result = call(function, args, kwargs or {})
        end, last = _now(), next_sequence_number()
        if last != first and function not in _PASSES:
            self._operations.append((first, last, begin, end))
            if events is not None:
                events.append((mark, _mark()))
        return result

    def _begin_compiled(self) -> tuple[Any, int, int]:
        return _mark() if self._events is not None else None, next_sequence_number(), _now()

    def _end_compiled(self, begun: tuple[Any, int, int]) -> None:
        mark, first, begin = begun
        self._operations.append((first, next_sequence_number(), begin, _now()))
        if self._events is not None:
            self._events.append((mark, _mark()))


def _mark() -> Any:
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark
