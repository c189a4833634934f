"""Which calls of modules, and which updates, run in this thread: told from the stack.

A call that was left by ``KeyboardInterrupt``, or an optimizer's step that raised, runs no hook at its end. So whoever
counts beginnings and ends by hooks alone loses count; the frame of a call that has ended is no longer on the stack.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Generic, Protocol, TypeVar

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


class CallInFrame(Protocol):
    """A call of a module, as somebody who listens to calls notes it; ``frame`` is the identity of its frame."""

    frame: int

    def end(self) -> None:
        """End it: it has ended, or was left."""


C = TypeVar("C", bound=CallInFrame)


class CallStack(Generic[C]):
    """Calls of modules that run in one thread, to be told of each beginning and end by hooks of the modules.

    Calls that were left without a word end when another one begins.

    Attributes:
        running: the calls, the innermost last.
    """

    def __init__(self) -> None:
        self.running: list[C] = []

    def begin_call(self) -> int:
        """Return the frame of the module call whose hook is running, to be put on the stack."""
        frame, around = hooked_calls()
        if self.running and self.running[-1].frame != around:
            self.settle(frame)
        return frame

    def end_call(self) -> None:
        """End the call whose hook is running, and those within it."""
        frame = hooked_call()
        running = self.running
        is_known = bool(running) and (running[-1].frame == frame or any(call.frame == frame for call in running))
        while is_known:
            call = running[-1]
            call.end()
            running.pop()
            is_known = call.frame != frame

    def settle(self, beginning: int = 0) -> None:
        """End calls that were left without a word.

        Args:
            beginning: frame of a call that begins. If an older call has it, that one is over: frames that end are
                used again.
        """
        running = self.running
        if not running:
            return
        alive = running_calls() - {beginning}
        while running and (running[-1].frame not in alive or any(call.frame == beginning for call in running)):
            running[-1].end()
            running.pop()


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
