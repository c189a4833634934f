"""How far a check has got, on the terminal, if it takes long."""

from __future__ import annotations

import sys
import time

_PATIENCE_SECONDS = 2.0
_WIDTH = 79


class Progress:
    """One line on standard error, written anew for each module, once a check has taken two seconds.

    Args:
        total: how many modules may be called.
        is_shown: whether to write it; None: if standard error is a terminal.
    """

    def __init__(self, total: int, is_shown: bool | None) -> None:
        self._total = total
        self._is_shown = sys.stderr.isatty() if is_shown is None else is_shown
        self._began = time.monotonic()
        self._seen: set[str] = set()
        self._has_written = False

    def step(self, path: str) -> None:
        """A module is about to be checked."""
        self._seen.add(path)
        if self._is_shown and time.monotonic() - self._began > _PATIENCE_SECONDS:
            line = f"checking adjoints: module {len(self._seen):,} of {self._total:,}, {path}"
            self._write(line[:_WIDTH].ljust(_WIDTH))
            self._has_written = True

    def end(self) -> None:
        """Take the line away."""
        if self._has_written:
            self._write(" " * _WIDTH + "\r")

    def _write(self, line: str) -> None:
        sys.stderr.write("\r" + line)
        sys.stderr.flush()
