"""The frames in which torch calls modules: what tells one call from another, also when one ended without a word.

A call that was left by ``KeyboardInterrupt`` runs no hook at its end. Its frame is then no longer on the stack.
"""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn

from retrograd.hooks.compiled_modules import call_around

_CALLS = (nn.Module._call_impl.__code__, call_around.__code__)


def hooked_call() -> int:
    """Identity of the frame of the module call whose hook is running; 0 where torch's own code calls none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _CALLS:
        frame = frame.f_back
    return id(frame) if frame is not None else 0


def hooked_calls() -> tuple[int, int]:
    """Identities of the frames of the module call whose hook is running, and of the call around it; 0 for none."""
    inner = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _CALLS:
            if inner:
                return inner, id(frame)
            inner = id(frame)
        frame = frame.f_back
    return inner, 0


def running_calls() -> set[int]:
    """Identities of the frames of all module calls on this thread's stack."""
    found = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _CALLS:
            found.add(id(frame))
        frame = frame.f_back
    return found


def running_module() -> nn.Module | None:
    """The module of the innermost call on this thread's stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _CALLS:
        frame = frame.f_back
    module = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame is not None else None
    return module if isinstance(module, nn.Module) else None
