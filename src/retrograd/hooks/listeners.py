"""Who is told of something, and what stands in torch for as long as anybody is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from retrograd.hooks.patches import Patch

Listener = TypeVar("Listener")


class Listeners(Generic[Listener]):
    """Those that are told of one kind of thing, in the order in which they came. Any thread may add and remove.

    Args:
        patch: what must stand in torch so that there is something to tell.
        greet: called with each new one, once it is told of all that follows: with what is under way already, say.

    Attributes:
        all: those of now; a tuple that nobody changes.
    """

    __slots__ = ("_greet", "_lock", "_patch", "all")

    def __init__(self, patch: Patch | None = None, greet: Callable[[Listener], None] | None = None) -> None:
        self.all: tuple[Listener, ...] = ()
        self._patch = patch
        self._greet = greet
        self._lock = threading.RLock()  # a listener may leave where the collector finds its owner gone

    def add(self, listener: Listener) -> None:
        """Tell this one from now on."""
        with self._lock:
            self.all = (*self.all, listener)
            if self._patch is not None:
                self._patch.hold()
        if self._greet is not None:
            self._greet(listener)

    def remove(self, listener: Listener) -> None:
        """Stop telling this one; nothing happens if it is not told."""
        with self._lock:
            left = tuple(other for other in self.all if other is not listener)
            removed, self.all = len(self.all) - len(left), left
            if self._patch is not None:
                for _ in range(removed):
                    self._patch.release()

    def __contains__(self, listener: object) -> bool:
        return any(other is listener for other in self.all)

    def __iter__(self) -> Iterator[Listener]:
        return iter(self.all)

    def __bool__(self) -> bool:
        return self.all != ()
