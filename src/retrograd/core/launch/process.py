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
from typing import Any

from retrograd.core.launch.tracebacks import hide_our_frames
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
