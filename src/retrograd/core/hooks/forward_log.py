"""Records of a running forward: which operation made the nodes of which numbers, where, and how long it took.

Nodes made in one thread are numbered in order; so an operation, and a call of a module, is known by the numbers before
and after it. Calls of modules are seen by hooks on all modules, operations by a function mode. Both are out of the way
while compiled code runs; what that makes counts as one operation.

Python Functions do not pass through the mode; the making of their node tells of them. From torch 2.14 on, torch itself
tells of every node that is made, but not by which function; so the mode is used there too.

All threads of a program, those of pools and of subclasses too, run through one method of ``threading.Thread``. A
wrapper stands in its place while somebody listens.

A clock is read around every operation that makes nodes, if asked for. Compiled code counts as one operation.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from retrograd.core.errors import TraceError
from retrograd.core.hooks.backward import EngineRun, backward_followers
from retrograd.core.hooks.calls import FIELDS, Logs, ModuleCall, Names, ThreadLog, frame_of_call, span_at
from retrograd.core.hooks.compiled import compiled_call_listeners
from retrograd.core.hooks.engine import (
    grad_enabled,
    is_compiling,
    is_in_backward,
    next_sequence_number,
    uncompiled,
    uncompiled_itself,
)
from retrograd.core.hooks.function_mode import FunctionListener, FunctionMode, is_fused
from retrograd.core.hooks.listeners import Listeners, Patch, Undo, replace
from retrograd.core.hooks.module import ModuleHooks
from retrograd.core.hooks.native import native
from retrograd.core.hooks.torch_calls import TORCHS_WAY, TorchCall, is_inner, user_frame
from retrograd.core.hooks.writes import TO_ARRAYS, WriteNotes


class ForwardLog:
    """Records what the forward does, in all threads, from ``start`` to ``stop``.

    Operations are noted in the thread that starts it and in those that begin later; in others within calls of modules.

    Args:
        names: knows the models.
        lines: note operations; else only calls of modules.
        logs: where it is noted.
        listeners: are shown all calls of torch functions besides.
    """

    def __init__(self, names: Names, logs: Logs, *listeners: FunctionListener, lines: bool = True) -> None:
        self._names = names
        self._logs = logs
        self._listeners = (OperationLog(logs), *listeners)
        self._make_tap = _tap_maker(logs, listeners)
        self._mode = FunctionMode() if lines else None
        self._undo: list[Callable[[], None]] = []
        self._hooks: ModuleHooks | None = None

    def start(self) -> None:
        """Begin to listen.

        Raises:
            TraceError: it listens already.
        """
        if self._undo:
            raise TraceError(
                "These origins are being recorded already.", repair="call rg.record_origins() once for each block."
            )
        self._logs.begin()
        self._silence(False)
        self._hooks = ModuleHooks(self._before, self._after)
        self._undo.append(self._hooks.remove)
        if self._mode is not None:
            function_logs.add(self._logs)
            self._undo.append(lambda: function_logs.remove(self._logs))
            backward_followers.add(self)
            self._undo.append(lambda: backward_followers.remove(self))
        compiled_call_listeners.add(self)
        self._undo.append(lambda: compiled_call_listeners.remove(self))
        if self._mode is not None:
            mode = self._mode
            mode.listeners = self._listeners
            if self._make_tap is not None:
                mode.hasten(self._make_tap(mode).call)
            mode.put_on()
            self._undo.append(lambda: mode.leave({log.thread for log in self._logs.all}))
            thread_listeners.add(mode)
            self._undo.append(lambda: thread_listeners.remove(mode))

    def stop(self) -> None:
        """Listen no more. What was noted stays."""
        here = self._logs.begin()
        while here.top is not None:
            here.drop()
        while self._undo:
            self._undo.pop()()
        self._hooks = None  # they refer to this object
        self._silence(True)
        for log in self._logs.all:
            log.top = log.undo_compiled = None

    def _silence(self, is_silent: bool) -> None:
        self._logs.is_silent = is_silent
        for log in self._logs.all:
            log.is_silent = is_silent

    def logs(self, thread: int | None = None) -> Iterator[ThreadLog]:
        """The logs of a thread, or of all: that of the calling thread first, then the newest."""
        here = threading.get_ident()
        for log in sorted(self._logs.all, key=lambda log: log.thread != here):
            if thread is None or log.thread == thread:
                yield log

    def clear(self) -> None:
        """Forget all that has ended."""
        for log in self._logs.all:
            log.clear()

    @uncompiled
    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if is_compiling():
            return
        log = self._logs.begin()
        if log.is_silent:
            return
        call = log.open(module, frame_of_call(), self._names, self.logs())
        mode = self._mode
        if call is not None and mode is not None:
            if is_fused(module, args):
                call.undo = mode.take_off()
            elif call.around is None and (not mode.is_entered() or is_in_backward()):
                call.undo = mode.put_on()

    @uncompiled
    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        log = self._logs.here.log
        if is_compiling() or log is None or log.is_silent:
            return
        frame = frame_of_call()
        call = log.close(id(frame))
        if call is not None and isinstance(module, torch.jit.ScriptModule):
            self._note(log, call.first, call.last, frame, module.original_name, call)

    def _note(
        self, log: ThreadLog, first: int, last: int, frame: FrameType, what: object, owner: ModuleCall | int | None
    ) -> None:
        if self._mode is not None and last > first:
            frame = user_frame(frame)
            log.insert(first, last, frame.f_code, frame.f_lasti, what, owner)

    @uncompiled
    def run_begins(self, run: EngineRun) -> None:
        """A backward pass begins: torch has taken the mode away to call it.

        It is put on again where the pass makes a graph. Where it does not, parts that are computed again do, and the
        calls of their modules put it on: everything in a pass that uses torch's Python functions would pay for it.
        """
        log = self._logs.begin()
        mode = self._mode if run.creates_graph and not log.is_silent else None
        log.undo_backward.append(mode.put_on() if mode is not None else None)

    @uncompiled
    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        """Put the mode back as it was before the pass."""
        log = self._logs.begin()
        undo = log.undo_backward.pop() if log.undo_backward else None
        if undo is not None:
            undo()

    @uncompiled
    def compiled_call_begins(self, function: object, frame: FrameType) -> None:
        """Compiled code begins: be out of its way, and count it as one operation."""
        log = self._logs.begin()
        module = getattr(function, "__self__", None)
        call = None
        if isinstance(module, nn.Module):
            call = log.open(module, frame, self._names, self.logs())
        first, code, offset = next_sequence_number(), *_position(user_frame(frame))
        name = type(module).__name__ if isinstance(module, nn.Module) else getattr(function, "__name__", "")
        put_on = self._mode.take_off() if self._mode is not None else None
        owner = log.owner()
        hooks = self._hooks
        assert hooks is not None
        hooks.pause()
        log.is_silent = True

        def undo() -> None:
            log.is_silent = False
            hooks.resume()
            if put_on is not None:
                put_on()
            last = next_sequence_number()
            if self._mode is not None and last > first:
                log.insert(first, last, code, offset, name, owner)
            if call is not None:
                log.close(call.frame)

        log.undo_compiled = undo

    @uncompiled
    def compiled_call_ends(self) -> None:
        """Compiled code has ended."""
        log = self._logs.begin()
        if log.undo_compiled is not None:
            log.undo_compiled()
            log.undo_compiled = None


def _position(frame: FrameType) -> tuple[CodeType, int]:
    return frame.f_code, frame.f_lasti


class OperationLog(FunctionListener):
    """Records operations that make nodes.

    Args:
        logs: where they are noted.
    """

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._here = logs.here
        self._most = logs.limit * FIELDS

    @uncompiled
    def after(self, call: TorchCall, seen: tuple[()]) -> None:
        """Record it if it has made nodes. Written out: a call more would cost a tenth of the whole."""
        first, last = call.first, next_sequence_number()
        if last == first:
            return
        log = self._here.log or self._logs.begin()
        frame = call.frame
        while is_inner[frame.f_code.co_filename]:
            outer = frame.f_back
            if outer is None:
                break
            frame = outer
        if log.is_silent:  # left on in a thread of the user's
            return
        operations = log.operations
        operation = (first, last, frame.f_code, frame.f_lasti, call.function, log.top or log.owner())
        if operations[1 - FIELDS] > first or len(operations) > self._most:
            log.insert(*operation)
        else:
            operations += operation


def _tap_maker(logs: Logs, listeners: tuple[FunctionListener, ...]) -> Callable[[FunctionMode], Any] | None:
    """What makes compiled code that notes operations, and writes if they are asked for; None where there is none."""
    if native is None or len(listeners) > 1 or not all(type(each) is WriteNotes for each in listeners):
        return None
    make = native.OperationTap

    def make_tap(mode: FunctionMode) -> Any:
        return make(
            logs=logs,
            here=logs.here,
            writes=next(iter(listeners), None),
            otherwise=mode.__torch_function__,
            fail=mode.fail,
            tensor_type=torch.Tensor,
            sequence_number=next_sequence_number,
            torchs_way=TORCHS_WAY,
            is_inner=is_inner,
            to_arrays=TO_ARRAYS,
            most=logs.limit * FIELDS,
        )

    return make_tap


@uncompiled
def _see_function(self: Any) -> None:
    """In place of the constructor of nodes of Python Functions."""
    if not grad_enabled() or is_compiling():
        return
    try:
        number = self._sequence_nr()
    except RuntimeError:  # before torch 2.12 the number is given out when this has returned
        number = next_sequence_number()
    for logs in function_logs:
        log = logs.begin()
        if not log.is_silent:
            frame = user_frame(sys._getframe(1))
            function = getattr(type(self), "_forward_cls", None)
            log.insert(number, number + 1, frame.f_code, frame.f_lasti, function, log.owner())


def _see_functions() -> list[Undo]:
    BackwardCFunction.__init__ = _see_function  # type: ignore[method-assign]
    return [_see_functions_no_more]


def _see_functions_no_more() -> None:
    if vars(BackwardCFunction).get("__init__") is _see_function:
        del BackwardCFunction.__init__


function_logs = Listeners[Logs](Patch(_see_functions))
"""Logs in which the nodes of Python Functions are noted."""


_NAME = "_bootstrap_inner"


class ThreadListener(Protocol):
    """Notified of threads, within them. Must not raise."""

    def thread_begins(self) -> None:
        """This thread is about to do its work."""

    def thread_ends(self) -> None:
        """This thread has done its work; told too if it listens no longer, as long as somebody holds the listener."""


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


_PASSES = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})
"""No operations: what is made while they run is made by checkpoints and double backward."""

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
        """Seconds that the operation took that made the node with this number; it may have made several."""
        index = span_at(self._operations, number)
        if index is None:
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
    def before(self, call: TorchCall) -> _Begun | None:
        """Read the clock."""
        if threading.get_ident() != self._thread or is_in_backward():
            return None
        return self._begin()

    @uncompiled
    def after(self, call: TorchCall, begun: _Begun) -> None:
        """Record the time if nodes were made."""
        if call.function not in _PASSES:
            self._end(begun)

    @uncompiled
    def compiled_call_begins(self, function: object, frame: FrameType) -> None:
        """Compiled code begins."""
        if threading.get_ident() == self._thread:
            self._compiled = self._begin()

    @uncompiled
    def compiled_call_ends(self) -> None:
        """Put the mode back as it was before the pass."""
        if self._compiled is not None and threading.get_ident() == self._thread:
            begun, self._compiled = self._compiled, None
            self._end(begun)

    def _end(self, begun: _Begun) -> None:
        end, (mark, first, begin), last = _now(), begun, next_sequence_number()
        if last != first:
            self._operations.append((first, last, begin, end))
            if self._events is not None:
                self._events.append((mark, _mark()))

    def _begin(self) -> _Begun:
        return _mark() if self._events is not None else None, next_sequence_number(), _now()


def _mark() -> Any:
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark
