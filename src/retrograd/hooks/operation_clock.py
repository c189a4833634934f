"""How long each operation of the forward takes, and when the nodes that it made were made.

A function mode reads the clock around every operation that makes nodes. Compiled code is left alone, and counts as one
operation. Some modules compute by other kernels where a function mode is on; it is not on while they run.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from operator import itemgetter
from types import FrameType
from typing import Any

import torch
from torch import nn

from retrograd.hooks.compiled_calls import listen_to_compiled_calls, unlisten_to_compiled_calls
from retrograd.hooks.engine import is_compiling, next_sequence_number, uncompiled, uncompiled_itself
from retrograd.hooks.operations import OperationMode
from retrograd.hooks.origins import _FUSED, _can_be_fused, _ModuleHooks
from retrograd.hooks.thread_logs import Logs

_PASSES = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})
"""No operations: what is made while they run is made by checkpoints and double backward."""

_first = itemgetter(0)
_now = time.perf_counter_ns

TimedOperation = tuple[int, int, int, int]
"""First number and the one after the last of the nodes it made; begin and end, by ``time.perf_counter_ns``."""


class OperationClock(OperationMode):
    """Times the operations of the thread that starts it; on a GPU how long they run there, as its events tell."""

    def __init__(self) -> None:
        super().__init__(Logs(1))
        self._operations: list[TimedOperation] = []
        self._events: list[tuple[Any, Any]] | None = [] if torch.cuda.is_available() else None
        self._spans: list[int] = []
        self._undo: list[Callable[[], None]] = []
        self._undo_compiled: Callable[[], None] | None = None
        self._hooks: _ModuleHooks | None = None
        self._fused: tuple[int, Callable[[], None]] | None = None

    def start(self) -> None:
        """Begin to listen."""
        self.put_on()
        self._undo.append(self.leave)
        self._hooks = _ModuleHooks(self._before, self._after)
        self._undo.append(self._hooks.remove)
        listen_to_compiled_calls(self)
        self._undo.append(lambda: unlisten_to_compiled_calls(self))

    def stop(self) -> None:
        """Listen no more. What was measured stays."""
        while self._undo:
            self._undo.pop()()
        self._undo_compiled = self._fused = None

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
        if not self._undo:  # stopped, and not yet taken off
            return function(*args, **kwargs) if kwargs else function(*args)
        events = self._events
        mark = _mark() if events is not None else None
        first, begin = next_sequence_number(), _now()
        result = function(*args, **kwargs) if kwargs else function(*args)
        end, last = _now(), next_sequence_number()
        if last != first and function not in _PASSES:
            self._operations.append((first, last, begin, end))
            if events is not None:
                events.append((mark, _mark()))
        return result

    @uncompiled
    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, _FUSED) and not is_compiling() and _can_be_fused(module, args):
            put_on = self.take_off()
            if put_on is not None:
                self._fused = id(module), put_on

    @uncompiled
    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._fused is not None and self._fused[0] == id(module) and not is_compiling():
            (_, put_on), self._fused = self._fused, None
            put_on()

    @uncompiled
    def compiled_call_begins(self, function: object, frame: FrameType) -> None:
        """Compiled code begins."""
        put_on = self.take_off()
        if put_on is None or self._hooks is None:  # in a thread that is not timed
            return
        hooks = self._hooks
        hooks.pause()
        mark = _mark() if self._events is not None else None
        first, begin = next_sequence_number(), _now()

        def undo() -> None:
            self._operations.append((first, next_sequence_number(), begin, _now()))
            if self._events is not None:
                self._events.append((mark, _mark()))
            hooks.resume()
            put_on()

        self._undo_compiled = undo

    @uncompiled
    def compiled_call_ends(self) -> None:
        """It has ended."""
        if self._undo_compiled is not None:
            self._undo_compiled()
            self._undo_compiled = None


def _mark() -> Any:
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark
