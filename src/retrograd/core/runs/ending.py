"""The exception that ended a run, as plain data for its record."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

MOST_LETTERS = 2000
"""Letters of a message that are recorded."""

MOST_LINES = 10
"""Lines of the program that are told, the innermost ones."""

_NOT_THE_PROGRAM = tuple(str(Path(str(file)).parent) + "/" for file in (torch.__file__, Path(__file__).parents[1]))
_ENGINE = "_engine_run_backward"
_APPLY = ("apply", str(Path("autograd", "function.py")))
_OWN = ("backward", str(Path(__file__).parents[2] / "tools" / "functions") + "/")
"""The frame in which an ``rg.Function`` begins its backward."""

_NAMED = re.compile(r"\bFunction '?(\w+)'? returned\b")


def find_exception() -> BaseException | None:
    """The exception that ends this process, asked when it ends; None when there is none, or it is not a failure."""
    error = getattr(sys, "last_value", None) or sys.exc_info()[1]
    return error if is_failure(error) else None


def is_failure(error: BaseException | None) -> bool:
    """Return whether a run that ends so has failed: not by ``sys.exit(0)``, nor by leaving a generator."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return error is not None and not isinstance(error, GeneratorExit)


def describe_exception(
    error: BaseException, find_module: Callable[[Any], str | None] = lambda _: None
) -> dict[str, Any]:
    """Describe an exception, safe to be written: texts are cut, and hold nothing that cannot be printed.

    Args:
        error: the exception. Of one that was turned into an exit (by ``torch.multiprocessing``, say), what was turned.
        find_module: the path of an object if it is a recorded module, else None.

    Returns:
        ``kind`` and ``message``; ``in_backward``: whether a backward pass raised it; ``node``: the name of the node
        that did, where that can be told; ``module``: the path of the innermost recorded module whose forward did,
        which nobody can tell of a backward pass by the exception alone;
        ``lines``: lines of the program that led to it, the innermost last.
    """
    if isinstance(error, SystemExit) and error.__context__ is not None:
        error = error.__context__
    frames = list(_walk(error.__traceback__))
    message = _read_message(error)
    in_backward = any(frame.f_code.co_name == _ENGINE for frame, _ in frames)
    return {
        "kind": _clean(_name_kind(type(error))),
        "message": message,
        "in_backward": in_backward,
        "node": (_find_function(frames) or _find_named(message)) if in_backward else None,
        "module": None if in_backward else _find_innermost(frames, find_module),
        "lines": _list_lines(frames),
    }


def describe_exit(code: object) -> dict[str, Any]:
    """Describe ``sys.exit(code)``, as it is called now, in the same form."""
    frames = list(traceback.walk_stack(sys._getframe(1)))
    return describe_exception(SystemExit(code)) | {"lines": _list_lines(frames[::-1])}


def _find_innermost(frames: list[tuple[FrameType, int]], find_module: Callable[[Any], str | None]) -> str | None:
    return next(filter(None, (find_module(frame.f_locals.get("self")) for frame, _ in reversed(frames))), None)


def _name_kind(kind: type[BaseException]) -> str:
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _read_message(error: BaseException) -> str:
    try:
        return _clean(str(error))
    except Exception as problem:  # the program's own __str__
        return f"(its text cannot be had: {type(problem).__name__})"


def _clean(text: str) -> str:
    """A text without what cannot be printed, and of no more letters than are recorded."""
    cut = text if len(text) <= MOST_LETTERS else text[:MOST_LETTERS] + f"… ({len(text):,} letters)"
    return "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in cut)


def _walk(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    yield from traceback.walk_tb(trace)


def _find_function(frames: list[tuple[FrameType, int]]) -> str | None:
    """The Python ``Function`` whose backward runs innermost."""
    for frame, _ in reversed(frames):
        code = frame.f_code
        if code.co_name == _APPLY[0] and code.co_filename.endswith(_APPLY[1]):
            return type(frame.f_locals.get("self")).__name__
        if code.co_name == _OWN[0] and code.co_filename.startswith(_OWN[1]):
            return type(frame.f_locals.get("ctx")).__name__
        if code.co_name == _ENGINE:
            return None
    return None


def _find_named(message: str) -> str | None:
    """The node that torch itself names in its message."""
    found = _NAMED.search(message)
    return found[1] if found else None


def _list_lines(frames: list[tuple[FrameType, int]]) -> list[str]:
    """``FILE:LINE in FUNCTION`` of the program's own frames; of all frames where none is its own."""
    own = [each for each in frames if not each[0].f_code.co_filename.startswith(_NOT_THE_PROGRAM)] or frames
    return [_clean(f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}") for frame, line in own[-MOST_LINES:]]
