"""The variables of running code."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
import textwrap
from types import CodeType, FrameType

_KEPT_BY_FRAME_ALONE = 3
"""References to such a dict where nobody but the frame, and the function that counts them, has it."""


def read_locals(frame: FrameType) -> dict[str, object]:
    """The variables of a frame; it holds no more of them than before.

    Up to Python 3.12 a function's frame that is asked for its variables keeps a dict of them until it ends, and with
    it models that the program drops meanwhile. That dict is emptied, unless the program has got it from ``locals()``.
    """
    seen = frame.f_locals
    local = dict(seen)
    is_of_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_of_function and type(seen) is dict and sys.getrefcount(seen) <= _KEPT_BY_FRAME_ALONE:
        seen.clear()
    return local


def find_argument() -> str:
    """The source of the first argument of the call that is running: of the nearest code that is not this package's.

    ``""`` where it is not known: code without a file, or several calls that Python does not tell apart.
    """
    frame: FrameType | None = sys._getframe(1)
    package = __name__.partition(".")[0]
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == package:
        frame = frame.f_back
    return "" if frame is None else _read_argument(frame.f_code, frame.f_lasti)


@functools.lru_cache(4096)
def _read_argument(code: CodeType, offset: int) -> str:
    first, last, start, end = list(code.co_positions())[offset // 2]
    if first is None or last is None or start is None or end is None:
        return ""
    lines = [linecache.getline(code.co_filename, number).encode() for number in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        tree = ast.parse(textwrap.dedent(b"".join(lines).decode()), mode="eval").body
    except (SyntaxError, ValueError):
        return ""
    return ast.unparse(tree.args[0]) if isinstance(tree, ast.Call) and tree.args else ""
