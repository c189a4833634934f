"""A ring of the last events that begins with the first backward pass: only then is the rank known."""

from __future__ import annotations

from collections.abc import Callable

from retrograd.hangs.watch import HangWatch
from retrograd.hooks.backward import EngineRun, backward_followers


class LateRing:
    """Waits for a pass, opens the ring, and tells it of that pass, of which torch's wrapper could not tell it.

    Args:
        open_ring: makes the ring; called once, when the first pass begins.
        failed: called if that raises; nothing is watched then.
    """

    def __init__(self, open_ring: Callable[[], HangWatch], failed: Callable[[Exception], None]) -> None:
        self._open_ring = open_ring
        self._failed = failed
        self._watch: HangWatch | None = None
        self._first: EngineRun | None = None
        backward_followers.add(self)

    def run_begins(self, run: EngineRun) -> None:
        """The engine is about to run."""
        if self._first is not None:
            return
        self._first = run
        try:
            self._watch = self._open_ring()
            self._watch.follower.run_begins(run)
        except Exception as error:  # a fault of ours must not stop the script
            self._failed(error)

    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        """The engine has run."""
        if run is self._first:
            backward_followers.remove(self)
            if self._watch is not None:
                self._watch.follower.run_ends(run, error)

    def close(self) -> None:
        """Watch no more; what is in the file stays."""
        backward_followers.remove(self)
        if self._watch is not None:
            self._watch.close()
