"""The calls of one module: their numbers, and which of them a checkpointed part computes again."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from typing import Any

from retrograd.hooks.checkpoints import CallsOfParts, part_computed_again
from retrograd.hooks.engine import grad_enabled
from retrograd.rewriting.clock import RuleClock

Remembered = dict[Hashable, list[Mapping[str, Any]]]


class NumberedCall:
    """One call.

    Attributes:
        number: which within the micro-batch, from 1.
        had_grad: grad was enabled, so that its results may have gradients of their own.
        remembered: what the rules of each site remembered before they saw its value.
    """

    __slots__ = ("had_grad", "number", "remembered")

    def __init__(self, number: int) -> None:
        self.number = number
        self.had_grad = grad_enabled()
        self.remembered: Remembered = {}


class _ThreadCount(threading.local):
    def __init__(self) -> None:
        self.serial = -1
        self.count = 0
        self.trained = (-1, 0)
        self.only: NumberedCall | None = None


class CallNumbers:
    """Counts the calls of one module, for each thread by itself.

    Args:
        clock: says when they are counted anew.
    """

    def __init__(self, clock: RuleClock) -> None:
        self._clock = clock
        self._here = _ThreadCount()
        self._only: NumberedCall | None = None
        self._parts = CallsOfParts[NumberedCall]()

    def begin(self) -> NumberedCall:
        """A call begins that was not there before."""
        return self.note(self.count_on())

    def count_on(self) -> int:
        """The number of a call that was not there before, where nobody asks for it again."""
        here = self._here
        serial = self._clock.serial
        if here.serial != serial:
            self._turn(here, serial)
        here.count += 1
        here.only = self._only = None
        return here.count

    def _turn(self, here: _ThreadCount, serial: int) -> None:
        """Count anew, or go on with a training that an evaluation has interrupted."""
        if here.serial == self._clock.trained:
            here.trained = here.serial, here.count
        here.count = here.trained[1] if here.trained[0] == serial else 0
        here.serial = serial

    def note(self, number: int) -> NumberedCall:
        """Remember the call of this number, for the case that a checkpointed part computes it again."""
        call = NumberedCall(number)
        self._here.only = self._only = call if number == 1 else None
        self._parts.add(call)
        return call

    def find_again(self) -> NumberedCall | None:
        """The call that is computed again; None where it cannot be told from others."""
        part = part_computed_again()
        if not self._parts.knows(part):
            return self._here.only if self._here.count else self._only  # a device's own thread has made no calls
        return self._parts.find_next(part)
