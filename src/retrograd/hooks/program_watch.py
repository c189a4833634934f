"""Watches what a program does step by step: at which lines nodes are made, what is written to, and every result.

What an error or a NaN needs afterwards has to be noted at every step, for it is not known ahead which one fails. So
this is one mode, and most functions cost it no more than a number and a line: only those that may write have versions
compared around them.
"""

from __future__ import annotations

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
    without_functions,
)
from retrograd.hooks.frames import user_frame
from retrograd.hooks.function_kinds import CARRIES, IDLE, SMOOTH, WRITES, kind_of
from retrograd.hooks.function_mode import ForwardListener
from retrograd.hooks.module_calls import OUTSIDE
from retrograd.hooks.node_places import NodePlaces
from retrograd.hooks.writes import WriteNotes

SeeResult = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Shown a function, its arguments and its result."""

SeeNodes = Callable[[int, Any, bool], None]
"""Shown the number of the first node that was made, the result, and whether something was written to."""

_Called = tuple[int, tuple[Any, ...], dict[str, Any], list[tuple[Tensor, int]] | None, int]
"""A function's kind, its arguments, the versions of what it may write to, and the number of the next node."""


class ProgramWatch(ForwardListener):
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
        if not self.is_started and not self._has_failed:
            self._thread = threading.get_ident()
            self.begin_step()
            self.start()

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

    @uncompiled
    def before(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> _Called | None:
        """Note the versions of what may be written to; None of what makes nothing."""
        kind = kind_of(function)
        if kind == IDLE or current_graph_task() != OUTSIDE or is_tracing():
            return None
        may_write = kind & WRITES or "out" in kwargs
        seen = self.writes.before(function, args, kwargs, frame) if may_write else None
        return kind, args, kwargs, seen, next_sequence_number()

    @uncompiled
    def after(self, called: _Called, function: Any, result: Any, frame: FrameType) -> None:
        """Note where its nodes are made, and show what is asked for."""
        kind, args, kwargs, seen, first = called
        last = next_sequence_number()
        if last != first:
            if first != self._last or not kind & SMOOTH:  # nodes that no function was seen to make, or rough ones
                self.is_rough = True
            self._last = last
            outer = user_frame(frame)
            self.places.note(first, last, outer.f_code, outer.f_lasti, function)
        if seen or self.see_nodes is not None or not self._is_dull(kind, result):
            with without_functions():
                self._show(function, args, kwargs, result, seen, first, frame)

    def fail(self, error: Exception) -> None:
        """Watch nothing more."""
        self._has_failed = True
        self._fault(error)

    def _is_dull(self, kind: int, result: Any) -> bool:
        """Whether nobody asks for this result."""
        if self.see_result is None:
            return True
        if not kind & CARRIES or self.is_bad:
            return False
        return type(result) is not Tensor or (result.dtype is not torch.float16 and result.dim() > 0)

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
    def module_begins(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is called."""
        super().module_begins(module, args)
        if current_graph_task() == OUTSIDE and self.is_here:
            self.places.enter(module)

    @uncompiled
    def module_ends(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Its call has ended."""
        is_fused = self._fused is not None
        super().module_ends(module, args, output)
        if is_fused and self._fused is None:  # its nodes were not seen, and are smooth
            self._last = next_sequence_number()
        if current_graph_task() == OUTSIDE and self.is_here:
            self.places.leave(module)
