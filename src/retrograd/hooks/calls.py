"""Which calls of modules, and which updates, run in this thread: told from the stack.

A call that was left by ``KeyboardInterrupt``, or an optimizer's step that raised, runs no hook at its end. So whoever
counts beginnings and ends by hooks alone loses count; the frame of a call that has ended is no longer on the stack.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType

from torch import nn
from torch.optim.optimizer import Optimizer

from retrograd.hooks.compiled import call_around

MODULE_CALLS = (nn.Module._call_impl.__code__, call_around.__code__)
"""The code that calls a module, which is its first argument."""

_STEPS = (Optimizer.profile_hook_step(lambda: None).__code__,)


def count_calls(module: nn.Module) -> int:
    """How many calls of a module, one within the other, this thread is in."""
    return _count(MODULE_CALLS, module)


def count_steps(optimizer: Optimizer) -> int:
    """How many steps of an optimizer this thread is in: two where a subclass calls the ``step`` of its parent."""
    return _count(_STEPS, optimizer)


def hooked_call() -> int:
    """Identity of the frame of the module call whose hook is running; 0 where torch's own code calls none."""
    frame = _find_call(sys._getframe(1))
    return id(frame) if frame is not None else 0


def hooked_calls() -> tuple[int, int]:
    """Identities of the frames of the module call whose hook is running, and of the call around it; 0 for none."""
    inner = _find_call(sys._getframe(1))
    outer = _find_call(inner.f_back) if inner is not None else None
    return id(inner) if inner is not None else 0, id(outer) if outer is not None else 0


def running_calls() -> set[int]:
    """Identities of the frames of all module calls on this thread's stack."""
    found = set()
    frame = _find_call(sys._getframe(1))
    while frame is not None:
        found.add(id(frame))
        frame = _find_call(frame.f_back)
    return found


def running_module() -> nn.Module | None:
    """The module of the innermost call on this thread's stack."""
    frame = _find_call(sys._getframe(1))
    module = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame is not None else None
    return module if isinstance(module, nn.Module) else None


def _find_call(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, this one or one around it, in which a module is called."""
    while frame is not None and frame.f_code not in MODULE_CALLS:
        frame = frame.f_back
    return frame


def _count(codes: tuple[CodeType, ...], owner: object) -> int:
    count = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in codes and frame.f_locals.get("self") is owner:
            count += 1
        frame = frame.f_back
    return count
