"""What a writer has to say, each thing once."""

from __future__ import annotations

from retrograd.notices import warn


class Complaints:
    """Warnings that are given once each and never stop training, not even where warnings are errors."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, kind: str, text: str) -> None:
        """Warn, unless something of this kind was said before."""
        if kind in self._said:
            return
        self._said.add(kind)
        warn(text)
