"""Functions of torch's that something of ours stands in for, until it is taken away again in whatever order."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

from retrograd.hooks.engine import uncompiled_itself

Undo = Callable[[], None]
Around = Callable[..., Any]


def replace(owner: Any, name: str, replacement: object) -> Undo:
    """Put something in the place of an attribute of a module or class.

    Returns:
        What puts the original back, unless somebody else has replaced it since: then theirs stays.
    """
    original = getattr(owner, name)

    def undo() -> None:
        if vars(owner).get(name) is replacement:
            setattr(owner, name, original)

    setattr(owner, name, replacement)
    return undo


class Patch:
    """What is put into torch with its first user, and taken out with its last.

    Args:
        install: puts it there; returns what takes each part out.
    """

    def __init__(self, install: Callable[[], Iterable[Undo]]) -> None:
        self._install = install
        self._lock = threading.RLock()
        self._users = 0
        self._undo: list[Undo] = []

    def hold(self) -> None:
        """Count one more user."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._undo.extend(self._install())

    def release(self) -> None:
        """Count one user less."""
        with self._lock:
            self._users -= 1
            while self._undo and not self._users:
                self._undo.pop()()


_lock = threading.RLock()
_chains: dict[tuple[type, str], list[Around]] = {}
_undo: dict[tuple[type, str], Undo] = {}


def wrap_method(owner: type, name: str, around: Around) -> Undo:
    """Call ``around(original, self, *args, **kwargs)`` instead of a method from now on.

    Returns:
        What takes it away; with the last one torch's own method is put back.
    """
    place = owner, name
    with _lock:
        if place not in _chains:
            _chains[place] = []
            _undo[place] = _wrap(owner, name, _chains[place])
        chain = _chains[place]
        chain.append(around)

    def undo() -> None:
        with _lock:
            chain.remove(around)
            if not chain and place in _undo:
                _undo.pop(place)()
                del _chains[place]

    return undo


def _wrap(owner: type, name: str, chain: list[Around]) -> Undo:
    original = getattr(owner, name)

    @functools.wraps(original)
    @uncompiled_itself
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = original
        for around in chain[:-1]:
            call = functools.partial(around, call)
        return chain[-1](call, self, *args, **kwargs) if chain else call(self, *args, **kwargs)

    return replace(owner, name, method)
