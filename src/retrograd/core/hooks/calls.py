"""Calls of modules that run in a thread, updates that run there, and the nodes that were made in each.

A call that was left by ``KeyboardInterrupt``, or an optimizer's step that raised, runs no hook at its end. So whoever
counts beginnings and ends by hooks alone loses count. The frame of a call that has ended is no longer on the stack:
the functions here ask the stack, and a :class:`CallLog` remembers by what frame each of its calls runs.
"""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, itemgetter
from types import CodeType, FrameType
from typing import Any, Generic, Protocol, TypeVar

from torch import nn
from torch.optim.optimizer import Optimizer

from retrograd.core.hooks.compiled import call_around, is_called_around
from retrograd.core.hooks.engine import current_node, is_in_backward, next_sequence_number

MODULE_CALLS = (nn.Module._call_impl.__code__, call_around.__code__)
"""The code that calls a module, which is its first argument."""

_STEPS = (Optimizer.profile_hook_step(lambda: None).__code__,)


def count_calls(module: nn.Module) -> int:
    """Count the calls of a module, one within the other, that this thread is in."""
    return _count(MODULE_CALLS, module)


def find_call_of(module: nn.Module) -> FrameType | None:
    """The frame of the innermost call of a module that this thread is in: the one that our hooks are called from."""
    codes = MODULE_CALLS[1:] if is_called_around(module) else MODULE_CALLS
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (frame.f_code in codes and frame.f_locals.get("self") is module):
        frame = frame.f_back
    return frame


def count_steps(optimizer: Optimizer) -> int:
    """Count the steps of an optimizer that this thread is in: two where a subclass calls the ``step`` of its parent."""
    return _count(_STEPS, optimizer)


def hooked_call() -> FrameType | None:
    """The frame of the module call whose hook is running; None where torch's own code calls none."""
    return _find_call(sys._getframe(1))


def running_module() -> nn.Module | None:
    """The module of the innermost call on this thread's stack."""
    frame = _find_call(sys._getframe(1))
    module = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame is not None else None
    return module if isinstance(module, nn.Module) else None


def _find_call(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, this one or one around it, in which a module is called."""
    while frame is not None and frame.f_code not in MODULE_CALLS:
        frame = frame.f_back
    return frame


def _count(codes: tuple[CodeType, ...], owner: object) -> int:
    count = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in codes and frame.f_locals.get("self") is owner:
            count += 1
        frame = frame.f_back
    return count


_last = attrgetter("last")


class RunningCall(Protocol):
    """A call that is on a :class:`CallStack`.

    Attributes:
        frame: identity of the frame in which torch makes it.
        around: the call around it; None if there is none.
    """

    frame: int
    around: Any

    def leave(self) -> None:
        """Take back what was set for it. An interrupt may come at any time, and then this is called again."""


Call = TypeVar("Call", bound=RunningCall)


class CallStack(Generic[Call]):
    """Calls of modules that run in one thread, one within the other.

    Attributes:
        top: the innermost.
    """

    def __init__(self) -> None:
        self.top: Call | None = None

    def settle(self, beginning: FrameType | None = None) -> None:
        """Forget calls that are over without having been closed.

        Args:
            beginning: the frame of a call that begins, which is no other's: frames that end are used again.
        """
        if self.top is None:
            return
        inner = sys._getframe(1) if beginning is None else beginning.f_back
        outer = inner
        while outer is not None and id(outer) != self.top.frame:
            outer = outer.f_back
        if outer is None:
            running = set(_identities(inner))
            while self.top is not None and self.top.frame not in running:
                self.drop()

    def pop(self, frame: int) -> Call | None:
        """End the call in the frame with this identity, and those within it; None if it is not known."""
        call = self.top
        while call is not None and call.frame != frame:
            call = call.around
        if call is not None:
            while self.top is not call.around:
                self.drop()
        return call

    def drop(self) -> None:
        """Forget the innermost call."""
        call = self.top
        assert call is not None
        call.leave()
        self.top = call.around


class Tree(Protocol):
    """The names of the modules of one model."""

    def path_of(self, module: nn.Module) -> str | None:
        """Where the module stands in it; None if it does not."""


class Names(Protocol):
    """Knows the models."""

    def tree_of(self, module: nn.Module, *, is_recomputed: bool) -> Tree:
        """The names to use inside a call of this module, which no other module has called."""


class ModuleCall:
    """A call of a module, which it does not hold."""

    __slots__ = (
        "around", "begin", "call", "end", "first", "frame", "is_recomputed", "is_wrapped", "last", "module", "path",
        "seen", "tree", "undo",
    )  # fmt: skip

    def __init__(self, module: nn.Module, path: str, frame: int, around: ModuleCall | None, tree: Tree | None) -> None:
        self.around = around
        self.path = path
        self.call = 1
        self.module = id(module)
        self.frame = frame
        self.tree = tree
        self.is_recomputed = is_in_backward()
        self.is_wrapped = around is not None and around.path == path and around.module != self.module
        """The call is that of the wrapper (DDP, a compiled module) around it."""
        self.seen: dict[str, int] = around.seen if around is not None else {}
        """Path → how often it was called so far, shared by all calls in one forward."""
        self.undo: Callable[[], None] | None = None
        self.begin = self.end = time.perf_counter_ns()
        self.first = self.last = next_sequence_number()

    def leave(self) -> None:
        """Undo what was done for it."""
        if self.undo is not None:
            self.undo()
            self.undo = None

    def count(self) -> None:
        """Find which call of its module this is."""
        if self.around is not None and self.is_wrapped:
            self.call = self.around.call
        else:
            self.call = self.seen[self.path] = self.seen.get(self.path, 0) + 1


class CallLog(CallStack[ModuleCall]):
    """The module calls of one thread, those that run and those that have ended.

    Attributes:
        thread: number of the thread.
        ended: those that have ended, in the order of their ends.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.ended: list[ModuleCall] = []
        self._limit = limit

    def open(self, module: nn.Module, frame: FrameType, names: Names, logs: Iterable[CallLog]) -> ModuleCall | None:
        """A module is called in this frame; None if it has no name."""
        self.settle(frame)
        around = self.top
        is_recomputed = is_in_backward()
        tree = around.tree if around is not None else names.tree_of(module, is_recomputed=is_recomputed)
        path = tree.path_of(module) if tree is not None else None
        if path is None:
            return None
        call = ModuleCall(module, path, id(frame), around, tree)
        if is_recomputed and not (around is not None and around.is_recomputed):
            call.seen = _calls_before(path, logs)
        call.count()
        self.top = call
        return call

    def close(self, frame: int) -> ModuleCall | None:
        """The module call of the frame with this identity is over; None if it was not told of."""
        call = self.pop(frame)
        if call is not None:
            call.end = time.perf_counter_ns()
            call.last = next_sequence_number()
            call.tree = None
            if not call.is_wrapped:
                self.ended.append(call)
            if len(self.ended) > self._limit:
                del self.ended[: self._limit // 2]
        return call

    def call_at(self, number: int) -> ModuleCall | None:
        """The innermost call in which a node with this number can have been made."""
        index = bisect_right(self.ended, number, key=_last)
        call = self.ended[index] if index < len(self.ended) else self.top
        while call is not None and call.first > number:
            call = call.around
        return call


def frame_of_call() -> FrameType:
    """The frame in which torch calls the module whose global hook is running. To be used in the hook itself."""
    frame = sys._getframe(2)
    outer = frame.f_back
    return outer if frame.f_code.co_name == "inner" and outer is not None else frame


def _identities(frame: FrameType | None) -> Iterable[int]:
    while frame is not None:
        yield id(frame)
        frame = frame.f_back


def _calls_before(path: str, logs: Iterable[CallLog]) -> dict[str, int]:
    """Count how often this module and those within it had been called before the call that is now run again."""
    node = current_node()
    number = node._sequence_nr() if node is not None else 0
    for log in logs:
        index = bisect_right(log.ended, number, key=_last)
        while index < len(log.ended) and (log.ended[index].path != path or log.ended[index].is_recomputed):
            index += 1
        if index < len(log.ended):
            return _calls_within(log.ended, index)
    return {}


def _calls_within(ended: list[ModuleCall], index: int) -> dict[str, int]:
    begin = ended[index].begin
    before: dict[str, int] = {}
    while index >= 0 and ended[index].begin >= begin:
        call = ended[index]
        before[call.path] = min(call.call - 1, before.get(call.path, call.call))
        index -= 1
    return before


Operation = tuple[int, int, CodeType | None, int, Any, ModuleCall | int | None]
"""First number and the one after the last; code and offset in it; the function called; the module call, or outside of
all the number of the node in whose backward it was called."""

FIELDS = 6
"""Of an operation."""

_first = itemgetter(0)


def span_at(spans: Sequence[tuple[Any, ...]], number: int) -> int | None:
    """Find the place of the span that holds this number of a node; None where none does.

    Args:
        spans: the first number of each and the one after its last, and anything else; ordered, without overlaps.
        number: of the node.
    """
    index = bisect_right(spans, number, key=_first) - 1
    return index if index >= 0 and number < spans[index][1] else None


_NOTHING: Operation = (-1, 0, None, 0, None, None)


class ThreadLog(CallLog):
    """The operations and module calls of one thread.

    Attributes:
        operations: those that made nodes, ordered by number; they do not overlap. The fields of each follow those of
            the one before: a tuple for each would wake the garbage collector, which then looks at all that there is.
        is_silent: nothing is noted, for compiled code runs or the recording is over.
    """

    def __init__(self, limit: int, *, is_silent: bool = False) -> None:
        super().__init__(limit)
        self.operations: list[Any] = [*_NOTHING]
        self.is_silent = is_silent
        self.undo_backward: list[Callable[[], None] | None] = []
        self.undo_compiled: Callable[[], None] | None = None

    def owner(self) -> ModuleCall | int | None:
        """To whom an operation that runs now belongs."""
        if self.top is not None:
            return self.top
        node = current_node() if is_in_backward() else None
        return node._sequence_nr() if node is not None else None

    def insert(self, first: int, last: int, *rest: Any) -> None:
        """Record an operation where others inside it may have been noted before: it gets the numbers that they left."""
        operations = self.operations
        end = len(operations)
        while (inner := operations[end - FIELDS : end - FIELDS + 2])[1] > first:
            if inner[1] < last:
                operations[end:end] = (inner[1], last, *rest)
            last = inner[0]
            end -= FIELDS
        if last > first:
            operations[end:end] = (first, last, *rest)
        if len(operations) > self._limit * FIELDS:
            del operations[FIELDS : self._limit // 2 * FIELDS]

    def operation_at(self, number: int) -> Operation | None:
        """The operation that made the node with this number."""
        operations = self.operations
        places = range(0, len(operations), FIELDS)
        place = places[bisect_right(places, number, key=operations.__getitem__) - 1]
        found: Any = tuple(operations[place : place + FIELDS])
        return found if number < found[1] else None

    def clear(self) -> None:
        """Forget what has ended."""
        del self.operations[FIELDS:], self.ended[:]


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
