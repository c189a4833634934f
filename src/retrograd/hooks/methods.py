"""Methods of torch's classes that something of ours stands around, until it is taken away again in whatever order."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from retrograd.hooks.engine import uncompiled_itself

Around = Callable[..., Any]

_lock = threading.RLock()
_chains: dict[tuple[type, str], list[Around]] = {}
_undo: dict[tuple[type, str], Callable[[], None]] = {}


def wrap_method(owner: type, name: str, around: Around) -> Callable[[], None]:
    """Call ``around(original, self, *args, **kwargs)`` instead of a method from now on.

    Returns:
        What takes it away; with the last one torch's own method is put back.
    """
    place = owner, name
    with _lock:
        if place not in _chains:
            _chains[place] = []
            _undo[place] = _replace(owner, name, _chains[place])
        chain = _chains[place]
        chain.append(around)

    def undo() -> None:
        with _lock:
            chain.remove(around)
            if not chain and place in _undo:
                _undo.pop(place)()
                del _chains[place]

    return undo


def _replace(owner: type, name: str, chain: list[Around]) -> Callable[[], None]:
    original = getattr(owner, name)

    @functools.wraps(original)
    @uncompiled_itself
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = original
        for around in chain[:-1]:
            call = functools.partial(around, call)
        return chain[-1](call, self, *args, **kwargs) if chain else call(self, *args, **kwargs)

    setattr(owner, name, method)

    def undo() -> None:
        if owner.__dict__.get(name) is method:  # else somebody wrapped it again: leave theirs alone
            setattr(owner, name, original)

    return undo
