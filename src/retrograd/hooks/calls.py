"""Which calls are running, told from the stack.

A call that was left by ``KeyboardInterrupt``, or an optimizer's step that raised, runs no hook at its end; so whoever
counts beginnings and ends by hooks alone loses count.
"""

from __future__ import annotations

import sys
from types import CodeType

from torch import nn
from torch.optim.optimizer import Optimizer

from retrograd.hooks.compiled_modules import call_around

MODULE_CALLS = (nn.Module._call_impl.__code__, call_around.__code__)
"""The code that calls a module, which is its first argument."""

_STEPS = (Optimizer.profile_hook_step(lambda: None).__code__,)


def count_calls(module: nn.Module) -> int:
    """How many calls of a module, one within the other, this thread is in."""
    return _count(MODULE_CALLS, module)


def count_steps(optimizer: Optimizer) -> int:
    """How many steps of an optimizer this thread is in: two where a subclass calls the ``step`` of its parent."""
    return _count(_STEPS, optimizer)


def _count(codes: tuple[CodeType, ...], owner: object) -> int:
    count = 0
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code in codes and frame.f_locals.get("self") is owner:
            count += 1
        frame = frame.f_back  # type: ignore[assignment]
    return count
