"""``sys.exit``, noted: of an exit by it Python tells nobody, not even when the process ends."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from retrograd.runs.ending import describe_exception, describe_exit, find_exception


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
                self._found = _describe(code)
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


def _describe(code: object) -> dict[str, Any] | None:
    if code in (None, 0):
        return None
    running = sys.exc_info()[1]
    return describe_exit(code) if running is None else describe_exception(running)
