"""What the forward does, noted raw while it runs: which operation made the nodes of which numbers, and where.

Nodes made in one thread are numbered in order; so an operation, and a call of a module, is known by the numbers before
and after it. Calls of modules are seen by hooks on all modules. These and what sees operations are out of the way
while compiled code runs; what that makes counts as one operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules

from retrograd.errors import TraceError
from retrograd.hooks.backward import EngineRun, backward_followers
from retrograd.hooks.compiled import compiled_call_listeners, keep_compiled_modules_quiet
from retrograd.hooks.engine import current_graph_task, grad_enabled, is_compiling, next_sequence_number, uncompiled
from retrograd.hooks.frames import user_frame
from retrograd.hooks.module import set_after_all, set_before_all
from retrograd.hooks.module_calls import OUTSIDE, ModuleCall, Names, frame_of_call
from retrograd.hooks.operations import OperationMode, OperationSeer, function_logs
from retrograd.hooks.thread_logs import Logs, ThreadLog
from retrograd.hooks.thread_starts import thread_listeners

_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""Modules that compute by other kernels where a function mode is on."""

_TABLES = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_forward_hooks_always_called")


class _ModuleHooks:
    """The hooks on all modules."""

    def __init__(self, before: Any, after: Any) -> None:
        numbers = {set_before_all(before).number, set_after_all(after).number}
        self._entries = [
            (table, number, value)
            for table in (getattr(modules, name) for name in _TABLES)
            for number, value in list(table.items())
            if number in numbers
        ]
        self._undo_quiet = keep_compiled_modules_quiet(*numbers)
        self._pauses = 0
        self._is_removed = False
        self._lock = threading.Lock()

    def pause(self) -> None:
        """Take them out of torch's tables until :meth:`resume`."""
        with self._lock:
            self._pauses += 1
            self._take_out()

    def resume(self) -> None:
        """Take back one call of :meth:`pause`."""
        with self._lock:
            self._pauses -= 1
            if not self._pauses and not self._is_removed:
                for table, number, value in self._entries:
                    table[number] = value

    def remove(self) -> None:
        """Take them away for good."""
        with self._lock:
            self._is_removed = True
            self._take_out()
            self._undo_quiet()

    def _take_out(self) -> None:
        for table, number, _ in self._entries:
            table.pop(number, None)


class ForwardLog:
    """Notes what the forward does, in all threads, from ``start`` to ``stop``.

    Operations are noted in the thread that starts it and in those that begin later; in others within calls of modules.

    Args:
        names: knows the models.
        lines: note operations; else only calls of modules.
        limit: operations, and calls, that are kept for each thread; beyond it the older half is forgotten.
        seer: is shown all operations, where they are noted.
    """

    def __init__(self, names: Names, *, lines: bool, limit: int, seer: OperationSeer | None = None) -> None:
        self._names = names
        self._logs = Logs(limit)
        self._source = OperationMode(self._logs, seer) if lines else None
        self._undo: list[Callable[[], None]] = []
        self._hooks: _ModuleHooks | None = None

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
        self._hooks = _ModuleHooks(self._before, self._after)
        self._undo.append(self._hooks.remove)
        if self._source is not None:
            function_logs.add(self._logs)
            self._undo.append(lambda: function_logs.remove(self._logs))
            backward_followers.add(self)
            self._undo.append(lambda: backward_followers.remove(self))
        compiled_call_listeners.add(self)
        self._undo.append(lambda: compiled_call_listeners.remove(self))
        if self._source is not None:
            source = self._source
            source.put_on()
            self._undo.append(source.leave)
            thread_listeners.add(source)
            self._undo.append(lambda: thread_listeners.remove(source))

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
        source = self._source
        if call is not None and source is not None:
            if isinstance(module, _FUSED) and _can_be_fused(module, args):
                call.undo = source.take_off()
            elif call.around is None and (not source.is_entered() or current_graph_task() != OUTSIDE):
                call.undo = source.put_on()

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
        if self._source is not None and last > first:
            frame = user_frame(frame)
            log.insert(first, last, frame.f_code, frame.f_lasti, what, owner)

    @uncompiled
    def run_begins(self, run: EngineRun) -> None:
        """A backward pass begins: torch has taken the mode away to call it.

        It is put on again where the pass makes a graph. Where it does not, parts that are computed again do, and the
        calls of their modules put it on: everything in a pass that uses torch's Python functions would pay for it.
        """
        log = self._logs.begin()
        source = self._source if run.creates_graph and not log.is_silent else None
        log.undo_backward.append(source.put_on() if source is not None else None)

    @uncompiled
    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        """It has ended."""
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
        put_on = self._source.take_off() if self._source is not None else None
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
            if self._source is not None and last > first:
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


def _can_be_fused(module: nn.Module, args: tuple[Any, ...]) -> bool:
    if module.training:
        return False
    tensors = [*nn.Module.parameters(module), *(arg for arg in args if isinstance(arg, torch.Tensor))]
    return not (grad_enabled() and any(tensor.requires_grad for tensor in tensors))
