"""What Functions remembered when a checkpointed part of a model first ran, for when that part is computed again.

A forward may read what its Function has remembered, and calls and backward passes that came since have added to that.
A part is computed again to get what it computed before, so its Functions must find the memory that they found then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from retrograd.hooks.checkpoints import CallsOfParts, parts_running
from retrograd.memory.memory import Memory


class _ThreadMemories(threading.local):
    def __init__(self) -> None:
        self.recalled: dict[int, Memory] = {}


_calls: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Function → what it remembered at each of its calls in checkpointed parts."""

_here = _ThreadMemories()


def note_memory(function: object, memory: Memory) -> None:
    """A call begins that was not there before; it may be in parts that are computed again later."""
    if parts_running():
        _calls.setdefault(function, CallsOfParts[Mapping[str, Any]]()).add(memory.snapshot())


def recalled_memory(function: object) -> Memory | None:
    """What stands for the memory of a Function in this thread now."""
    return _here.recalled.get(id(function)) if _here.recalled else None


@contextmanager
def recalling(function: object, memory: Memory, part: Any) -> Iterator[None]:
    """In the block, which is a call of that part, the Function has the memory of then; what it adds is lost."""
    recalled = Memory()
    calls = _calls.get(function)
    snapshot = calls.find_next(part) if calls is not None else None
    recalled.restore(snapshot if snapshot is not None else memory.snapshot())
    earlier = _here.recalled
    _here.recalled = {**earlier, id(function): recalled}
    try:
        yield
    finally:
        _here.recalled = earlier
