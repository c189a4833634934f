"""Polls a record while it grows, in a thread of its own, at a bounded cost."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable

from retrograd.core.limits import LIMITS
from retrograd.core.notices import warn, warn_of_fault, warnings_kept


class Lookout:
    """Calls a function again and again, and once more when it is ended, at the latest when the program ends.

    What the function raises is told once, as a warning; the next look comes all the same. The function must not draw
    random numbers, nor set them back: the program draws meanwhile.

    Args:
        look: called in the thread, with whether this is the last time.
        what: what it does, for the warning, as in ``"mirror to wandb"``.
    """

    def __init__(self, look: Callable[[bool], None], what: str) -> None:
        self._look = look
        self._what = what
        self._over = threading.Event()
        self._process = os.getpid()
        self._is_told = False
        self._thread = threading.Thread(target=warnings_kept()(self._run), name="retrograd-lookout", daemon=True)
        atexit.register(self.end)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """True once the last look was taken."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the last look, which somebody else may ask for; ``timeout`` seconds at most."""
        if os.getpid() == self._process:  # a fork has no such thread
            self._thread.join(timeout)

    def stop(self) -> None:
        """Take the last look soon; returns at once."""
        self._over.set()

    def end(self) -> None:
        """Take the last look, and return when it was taken, or took too long. Calling it twice is harmless."""
        atexit.unregister(self.end)
        self._over.set()
        if os.getpid() != self._process or threading.current_thread() is self._thread:  # a fork has no such thread
            return
        self._thread.join(LIMITS.last_look_seconds)
        if self._thread.is_alive():
            within = f"{LIMITS.last_look_seconds:.0f} seconds"
            warn(f"retrograd could not {self._what} within {within}; the last of it may be missing.")

    def _run(self) -> None:
        rest = LIMITS.flush_seconds
        while not self._over.wait(rest):
            begun = time.thread_time()
            self._try(is_last=False)
            rest = max(LIMITS.flush_seconds, (time.thread_time() - begun) / LIMITS.look_share)
        self._try(is_last=True)

    def _try(self, *, is_last: bool) -> None:
        try:
            self._look(is_last)
        except Exception as error:
            if not self._is_told:
                self._is_told = True
                warn_of_fault(self._what, error)
