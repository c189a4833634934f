"""Calls from a frame that looks like the program's own, so that a warning names the program's line, and once."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch.overrides

_OVERRIDES = torch.overrides.__file__
_CALL: CodeType = (lambda function, args, kwargs: function(*args, **kwargs)).__code__  # on one line


class SameFrames:
    """Stands between a function mode and what it calls.

    Python asks the caller's frame for file, line and for what it has warned of before. One that passes a call on from
    another file would be named in its place, and the warning would be given a second time where we are not.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], tuple[CodeType, Callable[..., Any]]] = {}
        """By identity of code, which is hashed as a whole each time, and offset in it."""

    def call(self, frame: FrameType, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a function as if from this frame, or from that outside of torch's own way to a mode."""
        return self.find(frame, function)(function, args, kwargs or {})

    def find(self, frame: FrameType, function: Any) -> Callable[..., Any]:
        """What calls ``(function, args, kwargs)`` so."""
        code = frame.f_code
        if code.co_filename == _OVERRIDES or code is getattr(function, "__code__", None):
            frame = _find_caller(frame, function)
            code = frame.f_code
        made = self._made.get((id(code), frame.f_lasti)) or self._make(frame)
        return made[1]

    def _make(self, frame: FrameType) -> tuple[CodeType, Callable[..., Any]]:
        code = _CALL.replace(
            co_filename=frame.f_code.co_filename,
            co_name=frame.f_code.co_name,
            co_qualname=frame.f_code.co_qualname,
            co_firstlineno=frame.f_lineno,
        )
        made = frame.f_code, FunctionType(code, frame.f_globals)
        self._made[id(frame.f_code), frame.f_lasti] = made
        return made

    def clear(self) -> None:
        """Hold no frame's globals."""
        self._made.clear()


def _find_caller(frame: FrameType, function: Any) -> FrameType:
    while frame.f_back is not None and (
        frame.f_code.co_filename == _OVERRIDES or frame.f_code is getattr(function, "__code__", None)
    ):
        frame = frame.f_back
    return frame
