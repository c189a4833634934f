"""Which calls of modules run in a thread, and which numbers the nodes made in each of them can have.

A call that was left by ``KeyboardInterrupt`` runs no hook at its end. So each call remembers by what frame it runs,
and one whose frame is not on the stack any more is over.
"""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from operator import attrgetter
from types import FrameType
from typing import Protocol

from torch import nn

from retrograd.hooks.engine import current_graph_task, current_node, next_sequence_number

OUTSIDE = -1
"""What torch says is the number of the running backward pass when none runs."""

_last = attrgetter("last")


class Tree(Protocol):
    """The names of the modules of one model."""

    def path_of(self, module: nn.Module) -> str | None:
        """Where the module stands in it; None if it does not."""


class Names(Protocol):
    """Knows the models."""

    def tree_of(self, module: nn.Module, *, is_recomputed: bool) -> Tree:
        """The names to use inside a call of this module, which no other module has called."""


class ModuleCall:
    """One call of a module. It does not hold the module."""

    __slots__ = (
        "around", "begin", "call", "end", "first", "frame", "is_recomputed", "is_wrapped", "last", "module", "path",
        "seen", "tree", "undo",
    )  # fmt: skip

    def __init__(self, module: nn.Module, path: str, frame: int, around: ModuleCall | None, tree: Tree | None) -> None:
        self.around = around
        self.path = path
        self.call = 1
        self.module = id(module)
        self.frame = frame
        self.tree = tree
        self.is_recomputed = current_graph_task() != OUTSIDE
        self.is_wrapped = around is not None and around.path == path and around.module != self.module
        """The call is that of the wrapper (DDP, a compiled module) around it."""
        self.seen: dict[str, int] = around.seen if around is not None else {}
        """Path → how often it was called so far, shared by all calls in one forward."""
        self.undo: Callable[[], None] | None = None
        self.begin = self.end = time.perf_counter_ns()
        self.first = self.last = next_sequence_number()

    def count(self) -> None:
        """Find which call of its module this is."""
        if self.around is not None and self.is_wrapped:
            self.call = self.around.call
        else:
            self.call = self.seen[self.path] = self.seen.get(self.path, 0) + 1


class CallLog:
    """The module calls of one thread.

    Attributes:
        thread: number of the thread.
        top: the innermost call that runs.
        ended: those that have ended, in the order of their ends.
    """

    def __init__(self, limit: int) -> None:
        self.thread = threading.get_ident()
        self.top: ModuleCall | None = None
        self.ended: list[ModuleCall] = []
        self._limit = limit

    def open(self, module: nn.Module, frame: FrameType, names: Names, logs: Iterable[CallLog]) -> ModuleCall | None:
        """A module is called in this frame; None if it has no name."""
        around = self._settle(frame) if self.top is not None else None
        is_recomputed = current_graph_task() != OUTSIDE
        tree = around.tree if around is not None else names.tree_of(module, is_recomputed=is_recomputed)
        path = tree.path_of(module) if tree is not None else None
        if path is None:
            return None
        call = ModuleCall(module, path, id(frame), around, tree)
        if is_recomputed and not (around is not None and around.is_recomputed):
            call.seen = _calls_before(path, logs)
        call.count()
        self.top = call
        return call

    def close(self, frame: int) -> ModuleCall | None:
        """The module call of the frame with this identity is over; None if it was not told of."""
        call = self.top
        while call is not None and call.frame != frame:
            call = call.around
        if call is not None:
            while self.top is not call.around:
                self.drop()
            call.end = time.perf_counter_ns()
            call.last = next_sequence_number()
            call.tree = None
            if not call.is_wrapped:
                self.ended.append(call)
            if len(self.ended) > self._limit:
                del self.ended[: self._limit // 2]
        return call

    def drop(self) -> None:
        """Forget the innermost call."""
        call = self.top
        assert call is not None
        self.top = call.around
        if call.undo is not None:
            call.undo()
            call.undo = None

    def call_at(self, number: int) -> ModuleCall | None:
        """The innermost call in which a node with this number can have been made."""
        index = bisect_right(self.ended, number, key=_last)
        call = self.ended[index] if index < len(self.ended) else self.top
        while call is not None and call.first > number:
            call = call.around
        return call

    def _settle(self, frame: FrameType) -> ModuleCall | None:
        """Forget calls that are over; returns the one around this frame."""
        assert self.top is not None
        outer = frame.f_back
        while outer is not None and id(outer) != self.top.frame:
            outer = outer.f_back
        if outer is None:
            running = set(_identities(frame.f_back))
            while self.top is not None and self.top.frame not in running:
                self.drop()
        return self.top


def frame_of_call() -> FrameType:
    """The frame in which torch calls the module whose global hook is running. To be used in the hook itself."""
    frame = sys._getframe(2)
    outer = frame.f_back
    return outer if frame.f_code.co_name == "inner" and outer is not None else frame


def _identities(frame: FrameType | None) -> Iterable[int]:
    while frame is not None:
        yield id(frame)
        frame = frame.f_back


def _calls_before(path: str, logs: Iterable[CallLog]) -> dict[str, int]:
    """How often this module and those within it had been called before the call that is now run again."""
    node = current_node()
    number = node._sequence_nr() if node is not None else 0
    for log in logs:
        index = bisect_right(log.ended, number, key=_last)
        while index < len(log.ended) and (log.ended[index].path != path or log.ended[index].is_recomputed):
            index += 1
        if index < len(log.ended):
            return _calls_within(log.ended, index)
    return {}


def _calls_within(ended: list[ModuleCall], index: int) -> dict[str, int]:
    begin = ended[index].begin
    before: dict[str, int] = {}
    while index >= 0 and ended[index].begin >= begin:
        call = ended[index]
        before[call.path] = min(call.call - 1, before.get(call.path, call.call))
        index -= 1
    return before
