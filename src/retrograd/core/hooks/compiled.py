"""Compiled code: where its calls begin and end, and where hooks of ours stand on modules that were compiled in place.

Torch.compile traces the function modes and the hooks on modules that it finds, and guards the graph against finding
others later. So they are taken away before it looks, and put back when its call has ended.

What ``torch.compile`` returns switches the compiler on by a function that it looks up in its module at each call. A
wrapper stands in its place while somebody listens; functions that were compiled before are reported too. The module is
not loaded for that: it takes as long as torch itself, and a program that compiles nothing may never need it.

From torch 2.14 on the compiler takes the hooks of a module that was compiled by ``module.compile()`` into the graph,
where ours have nothing to see. So they stand in tables of their own, and are called around the compiled call: outside
of all hooks of the program's.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from operator import attrgetter
from types import FrameType, ModuleType
from typing import Any, Protocol

import torch
from torch import nn
from torch._C._dynamo import eval_frame

from retrograd.core.hooks.engine import TORCH, is_compiling, uncompiled, uncompiled_itself
from retrograd.core.hooks.listeners import Listeners, Patch, Undo, hidden, replace
from retrograd.core.hooks.private_names import GLOBAL_TABLES
from retrograd.core.notices import warn

_ROOM = "torch._dynamo.eval_frame"
_NAME = "_maybe_set_eval_frame"
_EXPORT_ROOM, _EXPORT_NAME = "torch.export._trace", "_export_to_torch_ir"
_HOOK_TABLES = GLOBAL_TABLES["torch.nn.modules.module"]


class CompiledCallListener(Protocol):
    """Notified of each outermost call of compiled code, in the thread that makes it. Must not raise."""

    def compiled_call_begins(self, function: object, frame: FrameType) -> None:
        """Called before a compiled function runs; ``frame`` is torch's, below that of the caller."""

    def compiled_call_ends(self) -> None:
        """Called when the compiled function has returned or raised."""


def _install() -> list[Undo]:
    return [when_loaded(_ROOM, _wrap_switch), watch_exports()]


compiled_call_listeners = Listeners[CompiledCallListener](Patch(_install))


class _OutermostCall(threading.local):
    frame = 0
    """Identity of the frame of the outermost compiled call in this thread; 0 outside of all."""


class _StrictExport(threading.local):
    runs = False
    """This thread is in a strict export."""


_export = _StrictExport()


def is_exporting() -> bool:
    """Return whether this thread is in a strict export: modules that are made are torch's, and none of the program."""
    return _export.runs


def watch_exports() -> Undo:
    """Keep all of ours out of what ``torch.export(strict=True)`` traces."""
    return when_loaded(_EXPORT_ROOM, _wrap_export)


def _wrap_export(room: ModuleType) -> Undo:
    """``torch.export(strict=True)`` traces as compiled code does, and does not switch the compiler on for it.

    What it makes is for others: none of our hooks becomes a part of it.
    """
    original = getattr(room, _EXPORT_NAME)

    @functools.wraps(original)
    @uncompiled_itself
    def export(*args: Any, **kwargs: Any) -> Any:
        if _export.runs:
            return original(*args, **kwargs)
        frame = sys._getframe()
        _export.runs = True
        told = compiled_call_listeners.all
        try:
            for listener in told:
                listener.compiled_call_begins(None, frame)
            with _global_hooks_hidden(), hidden(args[0]) if isinstance(args[0], nn.Module) else nullcontext():
                return original(*args, **kwargs)
        finally:
            _export.runs = False
            for listener in told:
                if listener in compiled_call_listeners:
                    listener.compiled_call_ends()

    return replace(room, _EXPORT_NAME, export)


def _wrap_switch(room: ModuleType) -> Undo:
    original = getattr(room, _NAME)
    here = _OutermostCall()
    told: dict[int, tuple[CompiledCallListener, ...]] = {}

    @functools.wraps(original)
    @uncompiled
    def switch(callback: Any) -> Any:
        frame = sys._getframe(1)
        if here.frame == id(frame):
            here.frame = 0
            for listener in told.pop(id(frame), ()):
                if listener in compiled_call_listeners:
                    listener.compiled_call_ends()
        elif callback is not None and not (here.frame or _export.runs) and frame.f_code.co_name != "__enter__":
            here.frame = id(frame)
            told[id(frame)] = compiled_call_listeners.all
            function = frame.f_locals.get("fn")
            for listener in compiled_call_listeners:
                listener.compiled_call_begins(function, frame)
        return original(callback)

    return replace(room, _NAME, switch)


class _ModuleFinder(MetaPathFinder):
    """Intercepts the loading of a module of torch's, and changes it.

    Args:
        name: its name.
        change: changes it; returns what takes that back.
    """

    def __init__(self, name: str, change: Callable[[ModuleType], Undo]) -> None:
        self._name = name
        self._change = change
        self._undo: Undo | None = None
        self._is_over = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(room: ModuleType) -> None:
                load(room)
                with _lock:
                    if not self._is_over:
                        self._undo = _apply(self._change, room)

            spec.loader.exec_module = load_and_change  # type: ignore[assignment, method-assign]
        return spec

    def remove(self) -> None:
        """Stop watching, and put back what was there."""
        with _lock:
            self._is_over = True
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            if self._undo is not None:
                self._undo()


def _apply(change: Callable[[ModuleType], Undo], room: ModuleType) -> Undo:
    """Change a module; not one of another torch that has nothing by the names that are asked for, which is told."""
    try:
        return change(room)
    except (AttributeError, KeyError) as error:
        _warn_of(room.__name__, error)
        return do_nothing


def _warn_of(room: str, error: Exception) -> None:
    warn(
        f"torch {torch.__version__} has another {room} than retrograd knows ({error}): inside "
        "compiled code less is recorded, or it takes longer to compile."
    )


def ask_once(names: Sequence[str]) -> Callable[[], bool]:
    """A question whether torch has these names, each ``module:name``; where it lacks one, that is told.

    It is for the first time that they are used: when one module has been loaded, others may still be loading.
    """

    @functools.cache
    def ask() -> bool:
        for name in names:
            room, _, path = name.partition(":")
            try:
                attrgetter(path)(_find_room(room))
            except (AttributeError, KeyError) as error:
                _warn_of(room, error)
                return False
        return True

    return ask


def _find_room(name: str) -> Any:
    return sys.modules[name]


def do_nothing() -> None:
    """Take nothing back."""


def when_loaded(name: str, change: Callable[[ModuleType], Undo]) -> Undo:
    """Change a module of torch's that loads slowly: now, or when the program loads it.

    Returns:
        What takes that back.
    """
    if name in sys.modules:
        return _apply(change, sys.modules[name])
    finder = _ModuleFinder(name, change)
    sys.meta_path.insert(0, finder)
    return finder.remove


def has_compiled_code() -> bool:
    """Return whether torch.compile has compiled anything in this process since it was last reset."""
    converter: Any = sys.modules.get("torch._dynamo.convert_frame")
    return converter is not None and bool(converter.output_codes.seen_ids)


def has_been_compiled(module: nn.Module) -> bool:
    """Return whether the forward of such modules is in compiled code by now, which finds no hook that is set later."""
    if _ROOM not in sys.modules:
        return False
    forward = inspect.getattr_static(type(module), "forward", None)  # a scripted module's cannot be asked for
    code = getattr(inspect.unwrap(forward) if callable(forward) else None, "__code__", None)
    return code is not None and bool(eval_frame._debug_get_cache_entry_list(code))


def may_have_run_compiled(module: nn.Module) -> bool:
    """Return whether a module that goes through torch.compile may have run; of a class of torch's own, if any has.

    For those torch compiles a function around the module, which is the same for all of them.
    """
    room: Any = sys.modules.get("torch._dynamo.external_utils")
    if has_been_compiled(module) or room is None or not type(module).__module__.startswith("torch."):
        return has_been_compiled(module)
    return bool(eval_frame._debug_get_cache_entry_list(room.wrap_inline(len).__code__))


def find_compiled_wrappers(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """What ``torch.compile`` has made of these modules, and may run code of them that was compiled by now."""
    if not has_compiled_code():
        return []
    kind: Any = sys.modules[_ROOM].OptimizedModule
    known = set(map(id, modules))
    found = [each for each in gc.get_referrers(kind) if type(each) is kind]
    return [each for each in found if id(vars(each).get("_modules", {}).get("_orig_mod")) in known]


_lock = threading.RLock()
_quiet: set[int] = set()
"""Numbers of those global hooks that a compiled module need not warn of."""


def keep_compiled_modules_quiet(*hooks: int) -> Undo:
    """Keep torch from warning, in the script's name, that hooks like ours fire once more for a compiled module.

    Args:
        hooks: numbers of the handles that global hooks on modules were registered with.

    Returns:
        What takes it back.
    """
    _quiet.update(hooks)
    _question.hold()

    def undo() -> None:
        _quiet.difference_update(hooks)
        _question.release()

    return undo


def _wrap_question() -> list[Undo]:
    room = torch.nn.modules.module

    def has_hook_of_others() -> bool:
        return any(number not in _quiet for name in _HOOK_TABLES for number in list(getattr(room, name)))

    return [replace(room, "_has_any_global_hook", has_hook_of_others)]


_question = Patch(_wrap_question)


@contextmanager
def _global_hooks_hidden() -> Iterator[None]:
    """Our hooks on all modules are out of torch's tables meanwhile; then those that nobody has removed are back."""
    tables: list[dict[int, Any]] = [getattr(torch.nn.modules.module, name) for name in _HOOK_TABLES]
    taken = [{number: table.pop(number) for number in list(table) if number in _quiet} for table in tables]
    try:
        yield
    finally:
        for table, hooks in zip(tables, taken, strict=True):
            table.update({number: hook for number, hook in hooks.items() if number in _quiet})


_HOOKS_ARE_COMPILED = TORCH >= (2, 14)


def tables_of(module: nn.Module) -> Any:
    """The owner of the tables of forward hooks, by torch's names, from which hooks of ours on a module are called."""
    call = module._compiled_call_impl
    if call is None or not _HOOKS_ARE_COMPILED:
        return module
    if not isinstance(call, _CompiledCall):
        call = _CompiledCall(module, call)
        module._compiled_call_impl = call  # not a part of the module's state
    return call


def is_called_around(module: nn.Module) -> bool:
    """Return whether hooks of ours are called around the compiled call of a module, which includes its own hooks."""
    return isinstance(module._compiled_call_impl, _CompiledCall)


class _CompiledCall:
    """Stands in the place of the compiled call, until its tables are empty."""

    def __init__(self, module: nn.Module, compiled: Any) -> None:
        self._module = module  # of which the compiled call is a method
        self._compiled = compiled
        self._forward_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._forward_pre_hooks_with_kwargs: OrderedDict[int, Any] = OrderedDict()
        self._forward_hooks: OrderedDict[int, Any] = OrderedDict()
        self._forward_hooks_with_kwargs: OrderedDict[int, Any] = OrderedDict()
        self._forward_hooks_always_called: OrderedDict[int, Any] = OrderedDict()

    @uncompiled_itself
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # as a part of something larger
            return self._compiled(*args, **kwargs)
        if not self._forward_pre_hooks and not self._forward_hooks:
            self._module._compiled_call_impl = self._compiled
        return call_around(self._module, self, args, kwargs)

    def before(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Call the hooks before the forward; returns the arguments."""
        for number, hook in tuple(self._forward_pre_hooks.items()):
            assert number in self._forward_pre_hooks_with_kwargs, "ours all take keyword arguments"
            args, kwargs = hook(self._module, args, kwargs) or (args, kwargs)
        return args, kwargs

    def after(self, args: Any, kwargs: Any, output: Any) -> Any:
        """Call the hooks after the forward; returns the output."""
        for number, hook in tuple(self._forward_hooks.items()):
            given = (args, kwargs) if number in self._forward_hooks_with_kwargs else (args,)
            changed = hook(self._module, *given, output)
            output = output if changed is None else changed
        return output

    def after_failure(self, args: Any) -> None:
        """Call the hooks that are called after a failure too."""
        for number, hook in tuple(self._forward_hooks.items()):
            if number in self._forward_hooks_always_called:
                hook(self._module, args, None)


@uncompiled_itself
def call_around(self: nn.Module, call: _CompiledCall, args: Any, kwargs: Any) -> Any:
    """A call of a module by compiled code. Its first argument has the name by which calls are told on the stack."""
    try:
        args, kwargs = call.before(args, kwargs)
        output = call._compiled(*args, **kwargs)
    except BaseException:
        call.after_failure(args)
        raise
    return call.after(args, kwargs, output)
