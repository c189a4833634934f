"""The process of a program: what a session does with it when it begins, forks, becomes another program, and ends."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.overrides

from retrograd.core.errors import RetrogradError
from retrograd.core.hooks.torch_calls import is_ours, is_stand_in
from retrograd.core.notices import warn_apart
from retrograd.core.runs.ending import describe_exception, describe_exit, find_exception


def follow_process(close: Callable[[], None], start_over: Callable[[], None]) -> None:
    """Call a function when the process ends, and another one in each forked child; warnings go to stderr meanwhile."""
    warn_apart()
    hide_our_frames()
    atexit.register(close)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=start_over)


def close_with_child(close: Callable[[], None]) -> None:
    """Call a function when this process ends, if it is a child of multiprocessing, which ends without ``atexit``."""
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, close, exitpriority=0)


def call_before_exec(call: Callable[[], None]) -> None:
    """Call a function before this process becomes another program, which ends it without a word."""
    for name in ("execv", "execve"):  # what all others of ``os`` come to
        setattr(os, name, _call_first(call, getattr(os, name)))


def _call_first(call: Callable[[], None], execute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(execute)
    def call_and_execute(*arguments: Any, **named: Any) -> Any:
        call()
        return execute(*arguments, **named)

    return call_and_execute


class ExitNote:
    """A note of what the last ``sys.exit`` of the main thread was called with, until :meth:`forget`."""

    def __init__(self) -> None:
        self._found: dict[str, Any] | None = None
        self._exit: Callable[..., Any] = sys.exit
        sys.exit = self._note(sys.exit)

    @property
    def failure(self) -> dict[str, Any] | None:
        """The noted exit as an exception; None where there was no exit, or a successful one."""
        return self._found

    def forget(self) -> None:
        """The program has caught it, and goes on."""
        self._found = None

    def _note(self, leave: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(leave)
        def exit_noted(code: object = None, /) -> Any:
            if threading.current_thread() is threading.main_thread():
                self._found = _describe_code(code)
            leave(code)

        return exit_noted


def end_as_interrupted() -> None:
    """Let Python end the process by SIGINT after all, where Ctrl-C was the end of the program.

    It notes that for the process when a KeyboardInterrupt leaves code that was compiled from text, and forgets it when
    any other such code runs: an import, or a named tuple, while we write the last of the record.
    """
    if isinstance(find_exception(), KeyboardInterrupt):
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


def _describe_code(code: object) -> dict[str, Any] | None:
    if code in (None, 0):
        return None
    running = sys.exc_info()[1]
    return describe_exit(code) if running is None else describe_exception(running)


# ---- the traceback that Python prints without us ----

_OVERRIDES = torch.overrides.__file__
"""File of the function by which torch asks a function mode, before the mode calls the same function again."""

_BELOW = (_OVERRIDES, str(Path(torch.__file__).with_name("_ops.py")))
"""Files of what a mode calls, to call what was asked for."""


def hide_our_frames() -> None:
    """Print exceptions that end the process without our frames; whatever printed them so far still does."""
    print_exception = sys.excepthook

    def print_clean(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(Exception):  # else it is printed as it is
            clean_traceback(error)
        print_exception(kind, error, error.__traceback__)

    sys.excepthook = print_clean


def clean_traceback(error: BaseException) -> None:
    """Take our frames, and what torch put there because of them, out of the traceback of an exception.

    The exceptions that led to it are treated alike. An exception of our own keeps its frames: they are what is wrong.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        waiting += [each.__cause__, each.__context__]
        if not isinstance(each, RetrogradError):
            each.__traceback__ = _rebuild(_drop_ours(each.__traceback__))


def _drop_ours(trace: TracebackType | None) -> list[TracebackType]:
    kept: list[TracebackType] = []
    is_below = False
    while trace is not None:
        frame = trace.tb_frame
        if is_ours[frame.f_code.co_filename] or is_stand_in(frame):
            is_below = True
        elif not (is_below and frame.f_code.co_filename in _BELOW):
            if is_below:
                _drop_way_to_mode(kept, frame)
            kept.append(trace)
            is_below = False
        trace = trace.tb_next
    return kept


def _drop_way_to_mode(kept: list[TracebackType], frame: FrameType) -> None:
    """Drop the first call of a function that a mode has called again, and torch's way from there to the mode."""
    while kept and kept[-1].tb_frame.f_code.co_filename == _OVERRIDES:
        kept.pop()
    if kept and kept[-1].tb_frame.f_code is frame.f_code:
        kept.pop()


def _rebuild(kept: list[TracebackType]) -> TracebackType | None:
    trace: TracebackType | None = None
    for each in reversed(kept):
        trace = TracebackType(trace, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return trace
