"""A function mode that is out of the way where it would change what is computed, or how.

Compiled code is left alone, for torch.compile guards its graphs against modes. Some modules compute by other kernels
where a mode is on; it is not on while they run.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._device import DeviceContext

from retrograd.hooks.compiled import compiled_call_listeners
from retrograd.hooks.engine import is_compiling, uncompiled
from retrograd.hooks.origins import _FUSED, _can_be_fused, _ModuleHooks
from retrograd.hooks.stacked_mode import StackedMode


class QuietMode(StackedMode):
    """Is on the stack of the thread that starts it; what it does with operations is its subclass's."""

    def __init__(self) -> None:
        super().__init__()
        self._undo: list[Callable[[], None]] = []
        self._hooks: _ModuleHooks | None = None
        self._fused: tuple[int, Callable[[], None]] | None = None
        self._aside: tuple[Callable[[], None], _ModuleHooks, Any] | None = None

    @property
    def is_started(self) -> bool:
        """Whether it has been started and not stopped; it may be left on for a while when it has been."""
        return bool(self._undo)

    def start(self, place: int | None = None) -> None:
        """Begin to listen, at this place of the stack or on top."""
        self.put_on(place)
        self._undo.append(self.leave)
        self._hooks = _ModuleHooks(self._before, self._after)
        self._undo.append(self._hooks.remove)
        compiled_call_listeners.add(self)
        self._undo.append(lambda: compiled_call_listeners.remove(self))

    def stop(self) -> None:
        """Listen no more. What was noted stays."""
        while self._undo:
            self._undo.pop()()
        self._aside = self._fused = self._hooks = None

    def _begin_compiled(self) -> Any:
        """Compiled code begins; what is returned is given back at its end."""

    def _end_compiled(self, begun: Any) -> None:
        """It has ended."""

    @uncompiled
    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, _FUSED) and not is_compiling() and _can_be_fused(module, args):
            put_on = self.take_off()
            if put_on is not None:
                self._fused = id(module), put_on

    @uncompiled
    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._fused is not None and self._fused[0] == id(module) and not is_compiling():
            (_, put_on), self._fused = self._fused, None
            put_on()

    @uncompiled
    def compiled_call_begins(self, function: object, frame: FrameType) -> None:
        """Compiled code begins."""
        put_on = self.take_off()
        if put_on is not None and self._hooks is not None:  # else in a thread that it is not on
            self._hooks.pause()
            self._aside = put_on, self._hooks, self._begin_compiled()

    @uncompiled
    def compiled_call_ends(self) -> None:
        """It has ended."""
        if self._aside is not None:
            (put_on, hooks, begun), self._aside = self._aside, None
            self._end_compiled(begun)
            hooks.resume()
            put_on()


def lowest_place() -> int:
    """The place on this thread's stack at which a mode may stay while the program enters and leaves modes of its own.

    A program takes off whatever is on top when it leaves a mode, so ours is below. A device is at the very bottom, and
    torch insists on it.
    """
    has_device = torch._C._len_torch_function_stack() and isinstance(torch._C._get_function_stack_at(0), DeviceContext)
    return 1 if has_device else 0
