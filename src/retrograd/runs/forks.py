"""Writers and forks: no fork in the middle of a write, and silence in the child."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

_LONGEST_WAIT = 5.0

_silencers: list[tuple[weakref.ref[threading.Lock], weakref.WeakMethod[Callable[[], None]]]] = []
_held: list[threading.Lock] = []


def outlive_forks(writing: threading.Lock, silence: Callable[[], None]) -> None:
    """Hold ``writing`` while this process forks, and call ``silence``, a method, in the child.

    A library that is caught in the middle of its work in another thread may hold locks that nobody will release
    in the child.
    """
    _silencers.append((weakref.ref(writing), weakref.WeakMethod(silence)))


def _hold_writers() -> None:
    for reference, _ in _silencers:
        writing = reference()
        if writing is not None and writing.acquire(timeout=_LONGEST_WAIT):
            _held.append(writing)


def _release_writers() -> None:
    while _held:
        _held.pop().release()


def _silence_writers() -> None:
    _release_writers()
    for _, method in _silencers:
        silence = method()
        if silence is not None:
            silence()
    _silencers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_writers, after_in_parent=_release_writers, after_in_child=_silence_writers)
