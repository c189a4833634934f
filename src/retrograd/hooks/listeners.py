"""Who is told of something, and what of ours stands in torch for as long as anybody is.

Whatever stands in for a function of torch's can be taken away again in any order, and a fault of ours never stops the
program that is looked at.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from retrograd.errors import NoGraphError
from retrograd.hooks.engine import uncompiled, uncompiled_itself
from retrograd.notices import warn

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


F = TypeVar("F", bound=Callable[..., Any])


def never_raise(consequence: str = "") -> Callable[[F], F]:
    """Decorate methods that torch calls in the middle of the program's work, and that return nothing.

    A root without a graph is nothing to tell of: torch does.

    Args:
        consequence: what follows from an error, as the warning says; where it is empty the object is told of it, by
            ``self.fault(name of the method, error)``.
    """

    def decorate(method: F) -> F:
        @functools.wraps(method)
        @uncompiled
        def call(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                method(self, *args, **kwargs)
            except NoGraphError:
                return
            except Exception as error:
                if consequence:
                    warn(f"{consequence}: {error!r}")
                else:
                    self.fault(method.__qualname__, error)

        return call  # type: ignore[return-value]

    return decorate
