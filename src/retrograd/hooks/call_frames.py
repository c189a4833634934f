"""The frames in which torch calls modules: what tells one call from another, also when one ended without a word.

A call that was left by ``KeyboardInterrupt`` runs no hook at its end. Its frame is then no longer on the stack.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

from torch import nn

_CALL = nn.Module._call_impl.__code__


def hooked_call() -> int:
    """Identity of the frame of the module call whose hook is running; 0 where torch's own code calls none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back
    return id(frame) if frame is not None else 0


def running_frames() -> Iterator[int]:
    """Identities of the frames of module calls on this thread's stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            yield id(frame)
        frame = frame.f_back
