"""What Functions remembered when a checkpointed part of a model first ran, for when that part is computed again.

A forward may read what its Function has remembered, and calls and backward passes that came since have added to that.
A part is computed again to get what it computed before, so its Functions must find the memory that they found then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from retrograd.hooks.checkpoints import parts_running
from retrograd.hooks.engine import current_graph_task
from retrograd.memory.memory import Memory


class _PartCalls:
    """What one Function remembered at each of its calls in a part, and how far each pass has got with them."""

    __slots__ = ("positions", "snapshots")

    def __init__(self) -> None:
        self.snapshots: list[Mapping[str, Any]] = []
        self.positions: dict[int, int] = {}


class _ThreadMemories(threading.local):
    def __init__(self) -> None:
        self.recalled: dict[int, Memory] = {}


_calls: WeakKeyDictionary[Any, dict[int, _PartCalls]] = WeakKeyDictionary()
"""By part and by Function, which lives as long as the part does."""

_here = _ThreadMemories()


def note_memory(function: object, memory: Memory) -> None:
    """A call begins that was not there before; it may be in parts that are computed again later."""
    parts = parts_running()
    if parts:
        _note(parts, function, memory.snapshot())


def recalled_memory(function: object) -> Memory | None:
    """What stands for the memory of a Function in this thread now."""
    return _here.recalled.get(id(function)) if _here.recalled else None


@contextmanager
def recalling(function: object, memory: Memory, part: Any) -> Iterator[None]:
    """In the block, which is a call of that part, the Function has the memory of then; what it adds is lost."""
    recalled = Memory()
    recalled.restore(_find(function, part, memory.snapshot()))
    earlier = _here.recalled
    _here.recalled = {**earlier, id(function): recalled}
    try:
        yield
    finally:
        _here.recalled = earlier


def _find(function: object, part: Any, otherwise: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = _calls.get(part, {}).get(id(function))
    if calls is None:
        return otherwise
    task = current_graph_task()
    position = calls.positions.get(task, 0)
    if position >= len(calls.snapshots):
        return otherwise
    calls.positions[task] = position + 1
    snapshot = calls.snapshots[position]
    _note(parts_running(), function, snapshot)  # parts within this one are made anew
    return snapshot


def _note(parts: list[Any], function: object, snapshot: Mapping[str, Any]) -> None:
    for part in parts:
        _calls.setdefault(part, {}).setdefault(id(function), _PartCalls()).snapshots.append(snapshot)
