"""How each operation of the forward is seen: the numbers before and after it, and the place that called it.

A function mode sees every operation that is called through torch's Python functions; one that makes no node is not
noted. Python Functions do not pass through the mode; the making of their node tells of them. From torch 2.14 on, torch
itself tells of every node that is made, but not by which function; so the mode is used there too.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Protocol

from torch.autograd.function import BackwardCFunction

from retrograd.hooks.engine import (
    grad_enabled,
    is_compiling,
    next_sequence_number,
    uncompiled,
    uncompiled_itself,
)
from retrograd.hooks.frames import is_inner, user_frame
from retrograd.hooks.listeners import Listeners
from retrograd.hooks.module_calls import ModuleCall
from retrograd.hooks.patches import Patch, Undo
from retrograd.hooks.stacked_mode import StackedMode
from retrograd.hooks.thread_logs import Logs
from retrograd.notices import warn


class OperationSeer(Protocol):
    """Shown every call of a torch function, also of those that make no node; if it raises, it is shown no more."""

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """It is about to be made; what is returned comes back with its result."""

    def after(self, seen: Any, function: Any, result: Any, frame: FrameType, call: ModuleCall | None) -> None:
        """It has returned.

        Args:
            seen: what :meth:`before` returned.
            function: the torch function.
            result: what it returned.
            frame: the innermost one, perhaps torch's.
            call: the innermost call of a module that is known.
        """


class OperationMode(StackedMode):
    """Notes operations. Written out in one method: a call more would cost a tenth of the whole.

    Args:
        logs: where they are noted.
        seer: is shown them besides.
    """

    def __init__(self, logs: Logs, seer: OperationSeer | None = None) -> None:
        super().__init__()
        self._logs = logs
        self._seer = seer
        self._here = logs.here
        self._limit = logs.limit

    @uncompiled_itself
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen = None if self._seer is None else self._show_before(args, kwargs or {})
        first = next_sequence_number()
        result = self.frames.find(sys._getframe(1), function)(function, args, kwargs or {})
        last = next_sequence_number()
        if seen is not None:
            self._show_after(seen, function, result, sys._getframe(1))
        if last != first:
            log = self._here.log or self._logs.begin()
            frame = sys._getframe(1)
            while is_inner[frame.f_code.co_filename]:
                outer = frame.f_back
                if outer is None:
                    break
                frame = outer
            if log.is_silent:  # left on in a thread of the user's
                self.leave_here()
                return result
            operations = log.operations
            operation = (first, last, frame.f_code, frame.f_lasti, function, log.top or log.owner())
            if operations[-1][1] > first or len(operations) > self._limit:
                log.insert(*operation)
            else:
                operations.append(operation)
        return result

    def _is_unused_in(self, thread: int) -> bool:
        return all(log.thread != thread for log in self._logs.all)

    @uncompiled
    def _show_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._seer is not None
        try:
            return self._seer.before(args, kwargs)
        except Exception as error:
            self._give_up(error)
            return None

    @uncompiled
    def _show_after(self, seen: Any, function: Any, result: Any, frame: FrameType) -> None:
        log, seer = self._here.log, self._seer
        try:
            if seer is not None:
                seer.after(seen, function, result, frame, log.top if log is not None else None)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Show nothing more: a fault of ours must not stop the program."""
        self._seer = None
        warn(f"what operations do is not noted any more: {error!r}")


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
