"""The variables of running code."""

from __future__ import annotations

import inspect
import sys
from types import FrameType

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
