"""How each operation of the forward is seen: the numbers before and after it, and the place that called it.

A function mode sees every operation that is called through torch's Python functions; one that makes no node is not
noted. Python Functions do not pass through the mode; the making of their node tells of them. From torch 2.14 on, torch
itself tells of every node that is made, but not by which function; so the mode is used there too.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch.autograd.function import BackwardCFunction

from retrograd.hooks.engine import grad_enabled, is_compiling, next_sequence_number, uncompiled
from retrograd.hooks.frames import is_inner, user_frame
from retrograd.hooks.function_mode import FunctionListener
from retrograd.hooks.listeners import Listeners
from retrograd.hooks.patches import Patch, Undo
from retrograd.hooks.thread_logs import Logs


class OperationLog(FunctionListener):
    """Notes operations that make nodes.

    Args:
        logs: where they are noted.
    """

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._here = logs.here
        self._limit = logs.limit

    @uncompiled
    def before(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> int:
        """Return the number of the first node that it can make."""
        return next_sequence_number()

    @uncompiled
    def after(self, first: int, function: Any, result: Any, frame: FrameType) -> None:
        """Note it if it has made nodes. Written out: a call more would cost a tenth of the whole."""
        last = next_sequence_number()
        if last == first:
            return
        log = self._here.log or self._logs.begin()
        while is_inner[frame.f_code.co_filename]:
            outer = frame.f_back
            if outer is None:
                break
            frame = outer
        if log.is_silent:  # left on in a thread of the user's
            return
        operations = log.operations
        operation = (first, last, frame.f_code, frame.f_lasti, function, log.top or log.owner())
        if operations[-1][1] > first or len(operations) > self._limit:
            log.insert(*operation)
        else:
            operations.append(operation)


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
