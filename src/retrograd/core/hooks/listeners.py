"""Listeners, and what of ours stands in torch while anybody listens: functions in its place, hooks in its tables.

Whatever stands in for a function of torch's can be taken away again in any order, and a fault of ours never stops the
program that is looked at.

Torch numbers all hooks of a process (of modules, optimizers, leaves) from one count, and a pickled model has the
numbers of its hooks in it. So our hooks have numbers of their own, below zero, and the program's hooks keep the numbers
that they would have without us.

Our hooks are kept out of whatever is made of a model: its pickles, its copies, and what ``torch.jit.script`` compiles.
A model is pickled with its tables of hooks, each of which is asked how: so a table that has had a hook of ours answers
for itself, as its class would without them, to the byte. Nothing is changed for any other dictionary.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from retrograd.core.errors import NoGraphError
from retrograd.core.hooks.engine import uncompiled, uncompiled_itself
from retrograd.core.hooks.parts import modules_of
from retrograd.core.notices import warn_of_fault

Listener = TypeVar("Listener")


class Listeners(Generic[Listener]):
    """Listeners to one kind of event, in the order in which they came. Any thread may add and remove.

    Args:
        patch: what must stand in torch so that there is something to tell.
        greet: called with each new one, once it is notified of all that follows: with what is under way already, say.

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
        """Notify this one from now on."""
        with self._lock:
            self.all = (*self.all, listener)
            if self._patch is not None:
                self._patch.hold()
        if self._greet is not None:
            self._greet(listener)

    def remove(self, listener: Listener) -> None:
        """Stop notifying this one; nothing happens if it is not notified."""
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
    """Replacements that are put into torch with their first user, and taken out with their last.

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


def never_raise(what: str = "") -> Callable[[F], F]:
    """Decorate methods that torch calls in the middle of the program's work, and that return nothing.

    A root without a graph is nothing to tell of: torch does.

    Args:
        what: what could not be done then, as a warning says; where it is empty the object is notified of the error, by
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
                if what:
                    warn_of_fault(what, error)
                else:
                    self.fault(method.__qualname__, error)

        return call  # type: ignore[return-value]

    return decorate


SeeGradient = Callable[[Tensor], None]

TAP, TAP_OF_WRAPPER = -1, -2
"""Numbers of the tap on a module, and of that on its compiled wrapper: the same for all, so that graphs find them."""

_numbers = itertools.count(-3, -1)


class Hook:
    """A hook of ours on a module or an optimizer.

    Where it is copied or pickled all the same, because somebody keeps hooks elsewhere than torch does, its copy is
    ``nullcontext().__exit__``, which does nothing and does not need this package.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__


def is_ours(hook: object) -> bool:
    """Return whether a hook in a table of torch's was set here."""
    return isinstance(hook, Hook)


class HookEntry:
    """A hook in a table of torch's, which it does not hold, from now until ``remove()``.

    Args:
        hook: what torch is to call.
        table: where torch looks for it.
        marks: tables in which torch looks up how to call it: with keyword arguments, or also after an exception. It
            asks for the number alone, so that the hook itself can stand there, and is told for one of ours.
        is_first: whether it comes before the hooks that are there.
        number: one of those that are the same everywhere; left out, it gets one of its own.

    Attributes:
        number: by which it stands in these tables.
    """

    __slots__ = ("_tables", "number")

    def __init__(
        self,
        hook: Any,
        table: dict[int, Any],
        marks: tuple[dict[int, Any], ...] = (),
        *,
        is_first: bool = False,
        number: int | None = None,
    ) -> None:
        self.number = next(_numbers) if number is None else number
        tables = (*marks, table)  # called only once it is known how
        for each in tables:
            each[self.number] = hook
            if isinstance(hook, Hook) and isinstance(each, OrderedDict):
                vars(each)[_REDUCE] = partial(_reduce_without_ours, weakref.ref(each))
        if is_first:
            move_first(table, self.number)
        self._tables = tuple(weakref.ref(each) for each in reversed(tables))

    @property
    def place(self) -> tuple[weakref.ref[dict[int, Any]], int]:
        """Its table, and the number by which it stands there."""
        return self._tables[0], self.number

    def put_first(self) -> None:
        """Call it before all others."""
        table = self._tables[0]()
        if table is not None and self.number in table:
            move_first(table, self.number)

    def put_last(self) -> None:
        """Call it after all others."""
        table = self._tables[0]()
        if table is not None and self.number in table:
            move_last(table, self.number)

    def remove(self) -> None:
        """Take it away. May be called twice."""
        for find in self._tables:
            table = find()
            if table is not None:
                table.pop(self.number, None)
                if isinstance(table, OrderedDict) and len(without_ours(table)) == len(table):
                    vars(table).pop(_REDUCE, None)


def move_first(table: Any, number: int) -> None:
    """Have a hook called before all others of its table, an ordered dictionary."""
    table.move_to_end(number, last=False)
    _align(table)


def move_last(table: Any, number: int) -> None:
    """Have a hook called after all others of its table, an ordered dictionary."""
    table.move_to_end(number)
    _align(table)


def _align(table: dict[int, Any]) -> None:
    """Bring the plain dictionary below into the same order: torch reads hooks of tensors there, its compiler all."""
    for number in list(table):
        table[number] = table.pop(number)


def hooks_on(tensor: Tensor) -> Any:
    """The table of the hooks on a tensor."""
    table: Any = tensor._backward_hooks
    if table is None:
        tensor._backward_hooks = table = OrderedDict()
        node = tensor.grad_fn
        if node is not None:
            node._register_hook_dict(tensor)
    return table


def enter_node(register: Callable[[Any], Any], hook: Callable[..., Any]) -> HookEntry:
    """Set a hook on a node of a graph, whose tables nobody but torch finds.

    Args:
        register: the node's ``register_hook`` or ``register_prehook``.
        hook: what torch is to call.
    """
    handle: RemovableHandle = register(hook)
    table = handle.hooks_dict_ref()
    assert table is not None
    entry = HookEntry(hook, table)
    del table[handle.id]
    if RemovableHandle.next_id == handle.id + 1:  # give the number back, unless another thread has counted on
        RemovableHandle.next_id = handle.id
    return entry


def without_ours(table: OrderedDict[Any, Any]) -> list[tuple[Any, Any]]:
    """The items of a table, without the hooks that were set here."""
    return [item for item in list(table.items()) if not isinstance(item[1], Hook)]


def _reduce_without_ours(find: weakref.ref[OrderedDict[Any, Any]], _protocol: int = 2) -> Any:
    """What pickles and copies a table of hooks, as its class does with what is left of it."""
    table = find()
    assert table is not None
    make, arguments, state, elements, _ = cast("tuple[Any, ...]", table.__reduce__())
    others = {name: value for name, value in (state or {}).items() if name != _REDUCE}
    return make, arguments, others or None, elements, iter(without_ours(table))


_REDUCE = "__reduce_ex__"
_NAME = "create_script_module"


def _wrap_scripting() -> Undo:
    room: Any = torch.jit._recursive
    original = getattr(room, _NAME)

    @functools.wraps(original)
    @uncompiled_itself
    def create(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with hidden(model):
            return original(model, *args, **kwargs)

    return replace(room, _NAME, create)


@contextmanager
def hidden(model: nn.Module) -> Iterator[None]:
    """Our hooks are taken out of a model meanwhile, and then every hook is back in its place."""
    tables = [table for module in modules_of(model) for table in (module._forward_hooks, module._forward_pre_hooks)]
    whole = [dict(table) for table in tables]
    for table in tables:
        for number in [number for number, hook in table.items() if is_ours(hook)]:
            del table[number]
    try:
        yield
    finally:
        for table, hooks in zip(tables, whole, strict=True):
            table.clear()
            table.update(hooks)


hidden_hooks = Patch(lambda: (_wrap_scripting(),))
"""While somebody holds it, models are scripted without our hooks."""
