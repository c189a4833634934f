"""The door to ``retrograd.compiled``, the room that puts taps and rules into graphs of torch.compile.

That room registers operations with torch and changes its compiler, and a program that compiles nothing needs neither.
So nothing imports it, and :func:`load` is the one place that loads it, by its name: when torch.compile traces the first
graph while somebody has taps or rules, or as soon as one of these is set where something is compiled already. Hooks are
set before that, and get their handles then; what they do while they are traced is asked of ``wing``.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from enum import Enum
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from retrograd.core.errors import CannotRewriteError, GraphBreakError
from retrograd.core.hooks.compiled import has_compiled_code, watch_exports, when_loaded
from retrograd.core.hooks.engine import has_transform, knows_at_once, may_break_graph, uncompiled_itself
from retrograd.core.hooks.listeners import Hook, Patch, Undo, replace
from retrograd.core.notices import warn

_WING = "retrograd.compiled.wing"
_OUTPUT = "torch._dynamo.output_graph"


class Part(Enum):
    """How much of the gradient of a tensor comes to a hook on it."""

    WHOLE = "all"
    SOME = "what comes from outside of the graph that uses it too"
    UNKNOWN = "nobody has looked at the graph that returns it"


def _trace_nothing(*_: object, **__: object) -> None:
    """Put nothing into a graph."""


class _NotLoaded:
    """Stands for the room while there is none: a graph gets no taps, and rules are refused."""

    is_loaded = False
    trace_tap = trace_entry = trace_exit = trace_forward = forget_run_ids = staticmethod(_trace_nothing)

    @staticmethod
    def trace_rules(*_: object, **__: object) -> Any:
        """Refuse rules.

        Raises:
            CannotRewriteError: always.
        """
        raise CannotRewriteError(
            "Rules act inside a graph of torch.compile, and this torch compiles otherwise than retrograd knows.",
            repair="call torch.compiler.disable() on the module, or run the model without torch.compile.",
            reason="a rule would be left out of the graph.",
        )


wing: Any = _NotLoaded()
"""The module ``retrograd.compiled.wing`` once it is loaded."""

_lock = threading.RLock()
_starts: list[_Start] = []


class HasHandle(Protocol):
    """What a graph knows by a tensor."""

    def take_handle(self, handle: Tensor) -> None:
        """Be known by this tensor, which leads here, from now on."""


_waiting: weakref.WeakSet[HasHandle] = weakref.WeakSet()


def expect_handle(owner: HasHandle) -> None:
    """Give it a handle: now, or when the first graph is traced. It is not held."""
    with _lock:
        if wing.is_loaded:
            owner.take_handle(wing.make_handle(owner))
        else:
            _waiting.add(owner)


class _Start:
    """Something that begins when the room is loaded."""

    def __init__(self, begin: Callable[[Any], list[Undo]]) -> None:
        self._begin = begin
        self._undo: list[Undo] = []

    def begin(self) -> None:
        self._undo = self._begin(wing)

    def end(self) -> None:
        with _lock:
            if self in _starts:
                _starts.remove(self)
            while self._undo:
                self._undo.pop()()


def load() -> Any:
    """The room ``retrograd.compiled``, loaded; where that fails, which is told once, what stands for it."""
    global wing
    with _lock:
        if not wing.is_loaded and not _failed:
            try:
                wing = import_module(_WING)
            except Exception as error:  # a fault of ours, or another torch: the program compiles all the same
                _failed.append(error)
                warn(f"Nothing is recorded inside of compiled code, for torch {torch.__version__} differs: {error!r}")
                return wing
            for owner in list(_waiting):
                owner.take_handle(wing.make_handle(owner))
            _waiting.clear()
            for start in _starts:
                start.begin()
    return wing


_failed: list[Exception] = []


def when_compiling(begin: Callable[[Any], list[Undo]]) -> list[Undo]:
    """Begin something when there are graphs: at once, or when the first one is traced.

    Args:
        begin: called with the room; returns what takes back what it has done.

    Returns:
        What takes that back.
    """
    with _lock:
        first_graph.hold()
        start = _Start(begin)
        _starts.append(start)
        if wing.is_loaded:
            start.begin()
        return [start.end, first_graph.release]


def _load_first() -> list[Undo]:
    if wing.is_loaded or has_compiled_code():
        load()
        return []
    return [when_loaded(_OUTPUT, _wrap_graphs)]


def _wrap_graphs(room: ModuleType) -> Undo:
    """Have torch load the room before it traces a graph; a torch that begins otherwise has it loaded at once."""
    owner = getattr(room, "OutputGraph", None)
    if owner is None:
        load()
        return _trace_nothing
    original = owner.__init__

    @functools.wraps(original)
    @uncompiled_itself
    def begin_graph(self: Any, *args: Any, **kwargs: Any) -> None:
        load()
        original(self, *args, **kwargs)

    return replace(owner, "__init__", begin_graph)


first_graph = Patch(_load_first)
"""While somebody holds it, the first graph that is traced has the room loaded."""

tapped_calls = Patch(lambda: [watch_exports(), *when_compiling(lambda room: room.watch_calls())])
"""While somebody holds it, calls of modules with nothing but taps are traced in short, and guarded."""

known_graphs = Patch(lambda: when_compiling(lambda room: room.watch_graphs()))
"""While somebody holds it, it is known of each graph that is compiled which of its outputs it uses."""


def hold_while_alive(patch: Patch, owner: object) -> Callable[[], object]:
    """Hold a patch for as long as an object is there.

    Returns:
        What releases it before; calling it twice is harmless.
    """
    patch.hold()
    release = weakref.finalize(owner, patch.release)
    release.atexit = False
    return release


# ---- hooks on modules as a graph sees them --------------------------------------------------------------------------


class TracedHook(Hook):
    """A hook on a module which is one operation where it is traced.

    Attributes:
        handle: by which graphs know it; there is none before the first graph.
    """

    __slots__ = ("handle",)

    handle: Any

    def take_handle(self, handle: Tensor) -> None:
        """Be known by this tensor."""
        self.handle = handle


class TracedTap(TracedHook):
    """A traced hook after forwards.

    Attributes:
        operation: what it is in a graph, one of those that ``retrograd.compiled.wing`` names.
    """

    __slots__ = ()

    operation: str


class BindsArguments(Protocol):
    """Knows the names of arguments."""

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by their names."""


class TracedEntry(TracedHook):
    """A traced hook before forwards.

    Attributes:
        names: of the arguments.
    """

    __slots__ = ("names",)

    names: BindsArguments


class UntracedHook(Hook):
    """A hook on a module that does nothing where it is traced."""

    __slots__ = ()


READERS = (TracedHook, UntracedHook)
"""Hooks that change nothing."""


# ---- while a graph is traced ----------------------------------------------------------------------------------------


@knows_at_once
def is_left_alone() -> bool:
    """While a graph is traced, tell whether it is exported, or this part of it is inside a ``torch.func`` transform."""
    return has_transform() or torch.compiler.is_exporting()


@knows_at_once
def tell_of_break(sites: str) -> None:
    """While a graph is traced, say that it breaks where rules act at these sites.

    Raises:
        GraphBreakError: if it must be whole.
    """
    if may_break_graph():
        warn(f"A graph of torch.compile breaks where rules act at {sites}: the code there runs uncompiled.")
        return
    raise GraphBreakError(
        f"Rules act at {sites}, which takes a graph break, and the graph must be whole.",
        repair="compile without fullgraph=True, or set the rules on outputs, inputs and gradients.",
        reason="compiled code reads a parameter before it calls the module, a transform has no values, and what is "
        "watched by hand is rewritten outside of the graph.",
    )
