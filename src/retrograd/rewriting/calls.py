"""The calls of one module: their numbers, and which of them a checkpointed part computes again."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from retrograd.hooks.checkpoints import part_computed_again, part_running
from retrograd.hooks.engine import current_graph_task, grad_enabled
from retrograd.rewriting.clock import Clock

Remembered = dict[Hashable, list[Mapping[str, Any]]]


class Call:
    """One call.

    Attributes:
        number: which within the micro-batch, from 1.
        had_grad: grad was enabled, so that its results may have gradients of their own.
        remembered: what the rules of each place remembered before they saw its value.
    """

    __slots__ = ("had_grad", "number", "remembered")

    def __init__(self, number: int) -> None:
        self.number = number
        self.had_grad = grad_enabled()
        self.remembered: Remembered = {}


class _Part:
    """The calls within one checkpointed part, and how far each backward pass has got with computing them again."""

    __slots__ = ("calls", "positions")

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.positions: dict[int, int] = {}


class Calls:
    """Counts the calls of one module.

    Args:
        clock: says when they are counted anew.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._serial = -1
        self._count = 0
        self._only: Call | None = None
        self._parts: WeakKeyDictionary[Any, _Part] = WeakKeyDictionary()

    def begin(self) -> Call:
        """A call begins that was not there before."""
        return self.note(self.count_on())

    def count_on(self) -> int:
        """The number of a call that was not there before, where nobody asks for it again."""
        if self._serial != self._clock.serial:
            self._serial = self._clock.serial
            self._count = 0
        self._count += 1
        self._only = None
        return self._count

    def note(self, number: int) -> Call:
        """Remember the call of this number, for the case that a checkpointed part computes it again."""
        call = Call(number)
        self._only = call if number == 1 else None
        part = part_running()
        if part is not None:
            self._parts.setdefault(part, _Part()).calls.append(call)
        return call

    def find_again(self) -> Call | None:
        """The call that is computed again; None where it cannot be told from others."""
        part = self._parts.get(part_computed_again())
        if part is None:
            return self._only
        task = current_graph_task()
        position = part.positions.get(task, 0)
        part.positions[task] = position + 1
        return part.calls[position] if position < len(part.calls) else None
