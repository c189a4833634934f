"""Frames of the stack: which are the program's own, what its lines are called, and calls that look like its own."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
import torch.overrides

from retrograd.hooks.engine import uncompiled

_OVERRIDES = torch.overrides.__file__
TORCHS_WAY: CodeType = torch.overrides.handle_torch_function.__code__
"""Of the call by which functions that torch writes in Python go to a mode."""

_CALL: CodeType = (lambda function, args, kwargs: function(*args, **kwargs)).__code__  # on one line


class _InnerFiles(dict[str, bool]):
    """Source file → whether its lines are none of the user's: torch's, ours, or generated."""

    _inner = tuple(f"{Path(str(package)).parent}/" for package in (torch.__file__, Path(__file__).parent))

    def __missing__(self, file: str) -> bool:
        answer = self[file] = file.startswith((*self._inner, "<eval_with_key>", "<frozen "))
        return answer


is_inner = _InnerFiles()


class _OurFiles(dict[str, bool]):
    """Source file → whether it is ours."""

    _ours = f"{Path(__file__).parents[1]}/"

    def __missing__(self, file: str) -> bool:
        answer = self[file] = file.startswith(self._ours)
        return answer


is_ours = _OurFiles()


def user_frame(frame: FrameType) -> FrameType:
    """The innermost frame of the user's code, from this one outwards."""
    while is_inner[frame.f_code.co_filename]:
        outer = frame.f_back
        if outer is None:
            break
        frame = outer
    return frame


class _Installed(dict[str, bool]):
    """Source file → whether it belongs to an installed package, or to Python."""

    _python = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
    _packages = ("/site-packages/", "/dist-packages/")

    def __missing__(self, file: str) -> bool:
        is_package = file.startswith(self._python) or any(each in file for each in self._packages)
        answer = self[file] = is_inner[file] or is_package
        return answer


_is_installed = _Installed()


def program_frame(frame: FrameType) -> FrameType:
    """The innermost frame of the program itself, from this one outwards; where all is installed, of who called us."""
    outer: FrameType | None = frame
    while outer is not None and _is_installed[outer.f_code.co_filename]:
        outer = outer.f_back
    return user_frame(frame) if outer is None else outer


def describe_frame(frame: FrameType) -> str:
    """``file:line`` of where a frame is."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_stand_in(frame: FrameType) -> bool:
    """Whether this frame only looks like one of the program: it holds none of its variables."""
    return frame.f_code.co_code == _CALL.co_code and frame.f_code.co_varnames == _CALL.co_varnames


class SameFrames:
    """Stands between a function mode and what it calls.

    Python asks the caller's frame for file, line and for what it has warned of before. One that passes a call on from
    another file would be named in its place, and the warning would be given a second time where we are not.
    """

    def __init__(self) -> None:
        self.made: dict[tuple[int, int], Callable[..., Any]] = {}
        """By identity of code, which is hashed as a whole each time, and offset in it."""
        self._codes: list[CodeType] = []
        """Held, so that no other gets their identities."""

    @uncompiled
    def make(self, frame: FrameType, function: Any) -> Callable[..., Any]:
        """What calls ``(function, args, kwargs)`` as if from this frame, or from that outside of torch's own way."""
        frame = find_caller(frame, function)
        key = id(frame.f_code), frame.f_lasti
        if key not in self.made:
            code = _CALL.replace(
                co_filename=frame.f_code.co_filename,
                co_name=frame.f_code.co_name,
                co_qualname=frame.f_code.co_qualname,
                co_firstlineno=frame.f_lineno,
            )
            self._codes.append(frame.f_code)
            self.made[key] = FunctionType(code, frame.f_globals)
        return self.made[key]

    def clear(self) -> None:
        """Hold no frame's globals."""
        self.made.clear()
        self._codes.clear()


@uncompiled
def find_caller(frame: FrameType, function: Any) -> FrameType:
    """The frame that calls a torch function, from this one outwards: not torch's own way to a mode."""
    while frame.f_back is not None and (
        frame.f_code.co_filename == _OVERRIDES or frame.f_code is getattr(function, "__code__", None)
    ):
        frame = frame.f_back
    return frame
