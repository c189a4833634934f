"""CPU time that is ours: of threads beside the training thread, and in that thread itself."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")


class _Spent(threading.local):
    seconds = 0.0


_total = 0.0
_here = _Spent()


def note_spent() -> None:
    """Add what the thread that asks has spent since it last did; where two do so at once, one may be left out."""
    global _total  # a lock would be held for good in a process that is forked meanwhile
    before, _here.seconds = _here.seconds, time.thread_time()
    _total += _here.seconds - before


def seconds_spent() -> float:
    """What all such threads have spent, in seconds."""
    return _total


class OwnTime(threading.local):
    """Measures what a thread spends in functions that are :func:`counted`, while it wants that; each by itself.

    Args:
        clock: CPU seconds of the thread that asks.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._is_wanted = False
        self._seconds = 0.0
        self._began = math.nan
        self.is_on = False
        """Whether a counted function that begins now is measured; not within another one."""

    def want(self, is_wanted: bool) -> None:
        """Measure from now on, or no more; a function that runs now is left out in whole."""
        self._is_wanted = is_wanted
        if math.isnan(self._began):
            self.is_on = is_wanted

    def run(self, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a function, and measure it."""
        began = self._clock()
        try:  # an interrupt may come at any time
            self.is_on, self._began = False, began
            function(*args, **kwargs)
        finally:
            self.is_on, self._began = self._is_wanted, math.nan
            self._seconds += self._clock() - began

    def read(self) -> float:
        """Seconds so far, the function among them that runs now; NaN if none does that is measured."""
        return self._seconds + self._clock() - self._began


own_time = OwnTime()


def counted(function: Callable[P, None]) -> Callable[P, None]:
    """Decorate what torch calls of ours at every step, recorded or not: a budget for overhead counts what it takes."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        if own_time.is_on:
            own_time.run(function, *args, **kwargs)
        else:
            function(*args, **kwargs)

    return call
