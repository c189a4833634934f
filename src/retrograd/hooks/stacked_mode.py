"""A function mode that is put on a thread's stack, and taken off, wherever it stands in it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from retrograd.hooks.errands import before_next_call, run_errands
from retrograd.hooks.frames import SameFrames


class StackedMode(TorchFunctionMode):
    """What it does is its subclass's; other modes on the stack keep their order.

    Attributes:
        frames: what it calls functions by, so that torch's warnings name the program's lines.
    """

    def __init__(self) -> None:
        super().__init__()
        self.frames = SameFrames()
        self._places: Counter[int] = Counter()
        """Thread → how often it is on its stack, with where torch has put it aside for a call of ``backward``."""
        self._begun: set[int] = set()
        """Threads that it was put on when they began."""
        self._is_leaving = False

    def put_on(self, place: int | None = None) -> Callable[[], None] | None:
        """Put it on this thread's stack, at this place or on top; returns what takes it off, None if it was on."""
        if _place_of(self) is not None:
            return None
        _insert(self, torch._C._len_torch_function_stack() if place is None else place)
        self._places[threading.get_ident()] += 1
        self._is_leaving = False
        return self._take_off

    def take_off(self) -> Callable[[], None] | None:
        """Take it off this thread's stack, leaving other modes; returns what puts it back, None if it was not on."""
        place = _place_of(self)
        if place is None:
            return None
        self._take_off()
        return lambda: self._put_back(place)

    def leave(self) -> None:
        """Take it off all threads that it is on.

        Off others, and off this one while torch has put it aside for a call of ``backward``, at the next call of a
        module there. Until then it sees operations and notes nothing.

        A thread that has used no torch yet may never do so, and nothing waits in torch's tables for it: where it does
        after all, :meth:`leave_here` is called.
        """
        self._take_off()
        self.frames.clear()
        self._is_leaving = True
        for thread, count in tuple(self._places.items()):
            if count and not (thread in self._begun and self._is_unused_in(thread)):
                before_next_call(thread, self._leave_thread)

    def leave_here(self) -> None:
        """Leave this thread at its next call of a module, for it uses torch."""
        thread = threading.get_ident()
        if self._is_leaving and thread in self._begun:
            self._begun.discard(thread)
            before_next_call(thread, self._leave_thread)

    def is_entered(self) -> bool:
        """Whether it is on this thread's stack, or put aside for a call of ``backward``."""
        return self._places[threading.get_ident()] > 0

    def thread_begins(self) -> None:
        """A thread of the program's begins."""
        self.put_on()
        self._begun.add(threading.get_ident())

    def thread_ends(self) -> None:
        """It ends."""
        self._begun.discard(threading.get_ident())
        self._take_off()
        run_errands()

    def _is_unused_in(self, thread: int) -> bool:
        """Whether it has seen nothing in a thread so far, and :meth:`leave_here` is called once it does."""
        return False

    def _leave_thread(self) -> None:
        """Unless it was put on anew since."""
        if self._is_leaving:
            self._take_off()

    def _take_off(self) -> None:
        place = _place_of(self)
        if place is not None:
            above = _pop_down_to(place + 1)
            torch._C._pop_torch_function_stack()
            _push(above)
            self._places[threading.get_ident()] -= 1

    def _put_back(self, place: int) -> None:
        self.put_on(place)


def _place_of(mode: StackedMode) -> int | None:
    for place in range(torch._C._len_torch_function_stack()):
        if torch._C._get_function_stack_at(place) is mode:
            return place
    return None


def _insert(mode: StackedMode, place: int) -> None:
    above = _pop_down_to(place)
    torch._C._push_on_torch_function_stack(mode)
    _push(above)


def _pop_down_to(place: int) -> list[Any]:
    return [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack() - place)]


def _push(popped: list[Any]) -> None:
    for mode in reversed(popped):
        torch._C._push_on_torch_function_stack(mode)
