"""Interrupts at chosen instructions."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any

LOOKS_FOR_SIGNALS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD", "RESUME"}
WHEN_DELETED = {"__del__", "_drop", "_forget"}  # nobody hears of an interrupt there


class Interrupter:
    """Raises ``KeyboardInterrupt`` before one instruction of some files.

    Args:
        files: of the code that is interrupted.
        place: which one, counted from 1; with 0 they are counted.
        is_realistic: only where Python looks for signals: after a call, at the beginning of a function and where a loop
            goes back.
    """

    def __init__(self, files: frozenset[str], place: int, *, is_realistic: bool) -> None:
        self.count = 0
        self._files = files
        self._place = place
        self._is_realistic = is_realistic
        self._last: dict[int, int] = {}  # by frame, which is not held: its variables would live longer

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "call":
            if frame.f_code.co_filename not in self._files or is_deleting(frame):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "return":
            self._last.pop(id(frame), None)
        elif event == "opcode" and self._is_counted(frame):
            self.count += 1
            if self.count == self._place:
                raise KeyboardInterrupt
        return self

    def _is_counted(self, frame: FrameType) -> bool:
        last, self._last[id(frame)] = self._last.get(id(frame)), frame.f_lasti
        if not self._is_realistic:
            return True
        checks, handler = read_code(frame.f_code)
        # the interrupt comes at the end of the instruction before, and so to what handles the errors of that one
        return last in checks and handler(last) == handler(frame.f_lasti)

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)


def is_deleting(frame: FrameType | None) -> bool:
    """Whether this runs because an object is deleted."""
    while frame is not None and frame.f_code.co_name not in WHEN_DELETED:
        frame = frame.f_back
    return frame is not None


@cache
def read_code(code: CodeType) -> tuple[frozenset[int], Callable[[int], int | None]]:
    """Where Python looks for signals, and what handles the errors of an instruction."""
    checks = frozenset(each.offset for each in dis.get_instructions(code) if each.opname in LOOKS_FOR_SIGNALS)
    entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    @cache
    def handler(offset: int) -> int | None:
        return next((entry.target for entry in entries if entry.start <= offset < entry.end), None)

    return checks, handler
