"""Watches what a program does step by step: at which lines nodes are made, what is written to, and every result.

What an error or a NaN needs afterwards has to be noted at every step, for it is not known ahead which one fails. So
this is one mode, and most functions cost it no more than a number and a line: only those that may write have versions
compared around them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.hooks.engine import (
    current_graph_task,
    is_tracing,
    next_sequence_number,
    uncompiled,
    uncompiled_itself,
    without_functions,
)
from retrograd.hooks.frames import user_frame
from retrograd.hooks.function_kinds import CARRIES, IDLE, SMOOTH, WRITES, kind_of
from retrograd.hooks.module_calls import OUTSIDE
from retrograd.hooks.node_places import NodePlaces
from retrograd.hooks.quiet_mode import QuietMode, lowest_place
from retrograd.hooks.writes import WriteNotes

SeeResult = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Shown a function, its arguments and its result."""

SeeNodes = Callable[[int, Any, bool], None]
"""Shown the number of the first node that was made, the result, and whether something was written to."""


class ProgramWatch(QuietMode):
    """Notes operations of the thread that starts it, but for those within a backward pass.

    Args:
        name_module: the path of a module, None where it has no name.
        fault: told of an error of ours; nothing is noted behind it.

    Attributes:
        places: where nodes were made.
        writes: the last writes in place.
        see_result: shown results, while the operation's frame is on the stack.
        see_nodes: shown nodes that were made.
        is_bad: something is not finite, so that also what functions only carry on is shown.
        is_rough: since the step began a node may have been made whose derivative is infinite.
    """

    def __init__(self, name_module: Callable[[nn.Module], str | None], fault: Callable[[Exception], None]) -> None:
        super().__init__()
        self._fault = fault
        self._thread = 0
        self._has_failed = False
        self._put_on: Callable[[], None] | None = None
        self.places = NodePlaces(name_module)
        self.writes = WriteNotes()
        self.see_result: SeeResult | None = None
        self.see_nodes: SeeNodes | None = None
        self.is_bad = self.is_rough = False
        self._last = 0

    def begin(self) -> None:
        """Watch this thread from now on."""
        if not self.is_started:
            self._thread = threading.get_ident()
            self.begin_step()
            self.start(lowest_place())

    def end(self) -> None:
        """Watch no more, and forget."""
        self._put_on = self.see_result = self.see_nodes = None
        self.stop()
        self.places.clear()

    @property
    def is_here(self) -> bool:
        """Whether this is the thread that is watched."""
        return self._thread == threading.get_ident()

    def pause(self) -> None:
        """Be out of the way of an optimizer, which reads a thousand attributes."""
        if self._put_on is None:
            self._put_on = self.take_off()

    def resume(self) -> None:
        """Take that back."""
        put_on, self._put_on = self._put_on, None
        if put_on is not None and self.is_started:
            put_on()

    def begin_step(self) -> None:
        """Ask anew whether derivatives may be infinite."""
        self.is_rough = False
        self._last = next_sequence_number()

    @uncompiled_itself
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = kind_of(function)
        is_out = kind == IDLE or self._has_failed or current_graph_task() != OUTSIDE
        if is_out or not self.is_started or is_tracing():
            return function(*args, **kwargs) if kwargs else function(*args)
        may_write = kind & WRITES or (kwargs and "out" in kwargs)
        seen = self.writes.before(args, kwargs or {}) if may_write else None
        first = next_sequence_number()
        result = self.frames.call(sys._getframe(1), function, args, kwargs)
        try:
            if next_sequence_number() != first:
                self._note(function, kind, first, sys._getframe(1))
            if seen or self.see_nodes is not None or not self._is_dull(kind, result):
                with without_functions():
                    self._show(function, args, kwargs or {}, result, seen, first, sys._getframe(1))
        except Exception as error:
            self._has_failed = True
            self._fault(error)
        return result

    @uncompiled
    def _note(self, function: Any, kind: int, first: int, frame: FrameType) -> None:
        if first != self._last or not kind & SMOOTH:  # nodes were made that no function was seen to make, or rough ones
            self.is_rough = True
        self._last = next_sequence_number()
        frame = user_frame(frame)
        self.places.note(first, self._last, frame.f_code, frame.f_lasti, function)

    @uncompiled
    def _is_dull(self, kind: int, result: Any) -> bool:
        """Whether nobody asks for this result."""
        if self.see_result is None:
            return True
        if not kind & CARRIES or self.is_bad:
            return False
        return type(result) is not Tensor or (result.dtype is not torch.float16 and result.dim() > 0)

    @uncompiled
    def _show(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        seen: list[tuple[Tensor, int]] | None,
        first: int,
        frame: FrameType,
    ) -> None:
        is_written = bool(seen) and any(tensor._version != version for tensor, version in seen or ())
        if seen:
            self.writes.after(seen, function, result, frame)
        if self.see_nodes is not None and next_sequence_number() > first:
            self.see_nodes(first, result, is_written)
        if self.see_result is not None:
            self.see_result(function, args, kwargs, result)

    @uncompiled
    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        super()._before(module, args)
        if current_graph_task() == OUTSIDE and self.is_here:
            self.places.enter(module)

    @uncompiled
    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        is_fused = self._fused is not None
        super()._after(module, args, output)
        if is_fused and self._fused is None:  # its nodes were not seen, and are smooth
            self._last = next_sequence_number()
        if current_graph_task() == OUTSIDE and self.is_here:
            self.places.leave(module)
