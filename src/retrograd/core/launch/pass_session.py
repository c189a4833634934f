"""A session that follows some backward passes of a process, and reports on them when the process ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TextIO

from torch import Tensor

from retrograd.core.amounts import count_of
from retrograd.core.errors import RetrogradError
from retrograd.core.hooks.backward import backward_listeners
from retrograd.core.launch.closing import say_end
from retrograd.core.launch.process import close_with_child, follow_process
from retrograd.core.notices import say, warnings_kept
from retrograd.core.randomness import random_kept
from retrograd.core.ranks.processes import is_loader_worker
from retrograd.core.runs.ranks import RankClaim


class PassSession(ABC):
    """Counts the outermost backward passes of a process. A fault of ours ends it, and never stops the script.

    Args:
        what: that which fails then, as in ``"the tracer"``.
        asked: which passes were asked for, to be said where they never came.
    """

    def __init__(self, what: str, asked: str) -> None:
        self._what = what
        self._asked = asked
        self._lock = threading.RLock()

    def follow_process(self) -> None:
        """Begin, begin again in forked children, and end when the process does."""
        follow_process(self.close, self.start_over)
        self.start()

    def start(self) -> None:
        """Count the passes of the process from 0."""
        self._ended = 0
        self._claim: RankClaim | None = None
        self._obstacle = ""
        self._closed = False
        self._is_child = False
        backward_listeners.add(self)
        self._start()

    def start_over(self) -> None:
        """Count those of a forked child for itself: what its parent has seen is the parent's."""
        self._lock = threading.RLock()
        self._stop()
        self.start()

    def backward_begins(self, roots: tuple[Tensor, ...]) -> None:
        """An outermost pass is about to run."""
        if is_loader_worker():
            self._run_safely(self._stop)
        elif not self._is_child and multiprocessing.parent_process() is not None:
            self._is_child = True
            close_with_child(self.close)

    def backward_ends(self, failed: bool) -> None:
        """An outermost pass has ended, and all that follow it know."""
        self._run_safely(lambda: self._count(failed))

    def close(self) -> None:
        """End it, show what was found and say so, once."""
        if self._closed:
            return
        self._closed = True
        self._run_safely(self._end)
        self._run_safely(self._stop)
        if self._claim is not None:
            self._claim.release()
        self._say_end()

    def _say_end(self) -> None:
        """Show what was found, and say what has become of what was asked for."""
        done = self._tell_done()
        # showing it loads modules, whereupon Python forgets that it was interrupted, and has another exit code
        is_interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
        if done and self._is_first_rank() and sys.__stderr__ is not None and not is_interrupted:
            # nobody listens, or the script has closed it; and what it does at its exit may draw too
            with contextlib.suppress(OSError, ValueError), random_kept(), warnings_kept():
                self._show(sys.__stderr__)
        say_end(self._tell_obstacle(), done, saw_nothing=not self._ended and not self._obstacle)

    @abstractmethod
    def _start(self) -> None:
        """Prepare, and follow the first pass if it was asked for."""

    @abstractmethod
    def _count(self, failed: bool) -> None:
        """A pass has ended: add it to ``_ended``, and begin or end what was asked for."""

    @abstractmethod
    def _end(self) -> None:
        """The process ends: write down what was found, if that was not done."""

    def _stop(self) -> None:
        """Take all hooks away."""
        backward_listeners.remove(self)

    @abstractmethod
    def _tell_done(self) -> str:
        """Return what was found, as text; empty for nothing."""

    @abstractmethod
    def _show(self, file: TextIO) -> None:
        """Print what was found."""

    def _is_first_rank(self) -> bool:
        return self._claim is not None and not self._claim.is_extra and not self._claim.rank

    def _run_safely(self, act: Callable[[], None]) -> None:
        try:
            with self._lock:
                act()
        except Exception as error:  # a fault of ours must not stop the script, nor be taken for its own
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Follow nothing more; said at once, since it may be long until the end."""
        self._stop()
        if not self._obstacle:
            self._obstacle = error.problem if isinstance(error, RetrogradError) else f"{self._what} failed: {error!r}"
            say(self._obstacle)

    def _tell_obstacle(self) -> str:
        if self._obstacle:
            return self._obstacle
        if self._ended:
            return f"{count_of(self._ended, 'backward pass', 'backward passes')} ran, and {self._asked}"
        return "no backward pass was seen"
