"""What was noted of the forward in each thread, raw: numbers, code and offsets in it."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from operator import itemgetter
from types import CodeType
from typing import Any

from retrograd.hooks.engine import current_graph_task, current_node
from retrograd.hooks.module_calls import OUTSIDE, CallLog, ModuleCall

Operation = tuple[int, int, CodeType | None, int, Any, ModuleCall | int | None]
"""First number and the one after the last; code and offset in it; the function called; the module call, or outside of
all the number of the node in whose backward it was called."""

_first = itemgetter(0)
_NOTHING: Operation = (-1, 0, None, 0, None, None)


class ThreadLog(CallLog):
    """What one thread did.

    Attributes:
        operations: those that made nodes, ordered by number; they do not overlap.
        is_silent: nothing is noted, for compiled code runs or the recording is over.
    """

    def __init__(self, limit: int, *, is_silent: bool = False) -> None:
        super().__init__(limit)
        self.operations: list[Operation] = [_NOTHING]
        self.is_silent = is_silent
        self.undo_backward: list[Callable[[], None] | None] = []
        self.undo_compiled: Callable[[], None] | None = None

    def owner(self) -> ModuleCall | int | None:
        """To whom an operation that runs now belongs."""
        if self.top is not None:
            return self.top
        node = current_node() if current_graph_task() != OUTSIDE else None
        return node._sequence_nr() if node is not None else None

    def insert(self, first: int, last: int, *rest: Any) -> None:
        """Note an operation where others inside it may have been noted before: it gets the numbers that they left."""
        operations = self.operations
        index = len(operations)
        while operations[index - 1][1] > first:
            inner = operations[index - 1]
            if inner[1] < last:
                operations.insert(index, (inner[1], last, *rest))
            last = inner[0]
            index -= 1
        if last > first:
            operations.insert(index, (first, last, *rest))
        if len(operations) > self._limit:
            del operations[1 : self._limit // 2]

    def operation_at(self, number: int) -> Operation | None:
        """The operation that made the node with this number."""
        operations = self.operations
        operation = operations[bisect_right(operations, number, key=_first) - 1]
        return operation if operation[0] <= number < operation[1] else None

    def clear(self) -> None:
        """Forget what has ended."""
        del self.operations[1:], self.ended[:]


class _OwnLog(threading.local):
    log: ThreadLog | None = None


class Logs:
    """The logs of all threads.

    Attributes:
        is_silent: the logs of threads that have none yet begin silent.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.is_silent = False
        self.here = _OwnLog()
        self.all: tuple[ThreadLog, ...] = ()
        self._lock = threading.Lock()

    def begin(self) -> ThreadLog:
        """The log of this thread."""
        log = self.here.log
        if log is None:
            log = self.here.log = ThreadLog(self.limit, is_silent=self.is_silent)
            with self._lock:
                self.all = (log, *self.all)
        return log

    def running_path(self) -> str | None:
        """Path of the innermost module whose call runs in this thread; None outside of all."""
        call = self.here.log.top if self.here.log is not None else None
        return call.path if call is not None else None
