"""Calls of modules as torch.compile traces them: those with taps alone go past torch's search for hooks.

Torch traces ``nn.Module._call_impl`` line by line for each module with a hook, which takes longer than most of its
layers; of a module without any it traces the forward alone. While there are taps, so it does of a module that has
nothing but taps, and their operations are put into the graph directly. What is guarded is the same: how many hooks each
table has, and of which class each is. A module with any other hook, or with a call of its own, is left to torch.

Torch does not guard that a module of its own classes has no hook: a like module with a tap would run the same graph,
and be seen no more. So while there are taps that is guarded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from inspect import getattr_static
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from retrograd.core.hooks.compiled import ask_once, watch_exports, when_loaded
from retrograd.core.hooks.compiled_roots import tap_roots
from retrograd.core.hooks.compiled_taps import is_handle
from retrograd.core.hooks.engine import has_transform
from retrograd.core.hooks.listeners import TAP, TAP_OF_WRAPPER, Hook, Patch, Undo, replace

_CALLS, _GUARDS = "torch._dynamo.variables.nn_module", "torch._dynamo.guards"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OF_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
_MARKS = ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
_OF_ALL = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
)


class TracedHook(Hook):
    """A hook on a module which is one operation where it is traced.

    Attributes:
        handle: by which graphs know it.
    """

    __slots__ = ("handle",)

    handle: Tensor


class TracedTap(TracedHook):
    """A traced hook after forwards.

    Attributes:
        trace: puts its operation into the graph: called with the handle and what the forward returned.
        put: puts it there without being traced, for a single tensor: called with what makes a node, the handle, the
            tensor, and whether grad is enabled.
    """

    __slots__ = ()

    trace: Callable[..., None]
    put: Callable[..., None]


class BindsArguments(Protocol):
    """Knows the names of arguments."""

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by their names."""


class TracedEntry(TracedHook):
    """A traced hook before forwards.

    Attributes:
        names: of the arguments.
        trace: puts its operation into the graph: called with the handle and the arguments by their names.
        put: as that of a :class:`TracedTap`, for tensors by their names.
    """

    __slots__ = ("names",)

    names: BindsArguments
    trace: Callable[..., None]
    put: Callable[..., None]


class UntracedHook(Hook):
    """A hook on a module that does nothing where it is traced."""

    __slots__ = ()


READERS = (TracedHook, UntracedHook)
"""Hooks that change nothing."""


def has_taps_alone(module: nn.Module) -> bool:
    """Tell whether the call of a module is torch's own, and nothing that is traced is among its hooks but taps."""
    kind = type(module)
    return (
        kind.__call__ is nn.Module.__call__
        and kind._call_impl is nn.Module._call_impl
        and any(isinstance(hook, TracedHook) for hook in module._forward_hooks.values())
        and all(isinstance(hook, READERS) for table in _HOOKS for hook in getattr(module, table).values())
        and not any(getattr(module, table) for table in _OF_BACKWARD)
        and not any(getattr(modules, table) for table in _OF_ALL)
        and "__call__" not in module.__dict__
        and "_call_impl" not in module.__dict__
        and "forward" not in module.__dict__
        and isinstance(getattr_static(module, "forward"), FunctionType)
    )


_ask_for_names = attrgetter(
    "UnspecializedNNModuleVariable.get_nn_module_stack_source",
    "is_lazy_module",
    "guard_to_detect_forward_monkeypatching",
    "record_nn_module_stack",
    "AttrSource",
    "DictGetItemSource",
    "ConstDictKeySource",
    "VariableTracker.build",
    "variables.TensorVariable",
    "variables.ConstantVariable",
    "variables.ConstDictVariable",
    "variables.TupleVariable",
    "variables.UserFunctionVariable",
)
"""What a short call is made of: where one of these is missing, torch traces calls as it does for hooks of others."""


def _shorten_calls(room: ModuleType) -> Undo:
    """Have torch's stand-in for a module go past the search for hooks."""
    rooms: Any = room
    owner = rooms.UnspecializedNNModuleVariable
    original, has_names = owner.call_function, ask_once({_CALLS: _ask_for_names})

    @functools.wraps(original)
    def call_function(self: Any, translator: Any, args: Any, kwargs: Any) -> Any:
        is_short = self.source is not None and has_taps_alone(self.value) and has_names()
        if is_short and not rooms.is_lazy_module(self.value) and _guards_tables(self, translator):
            return _trace_call(rooms, self, translator, args, kwargs)
        return original(self, translator, args, kwargs)

    return replace(owner, "call_function", call_function)


def _trace_call(room: Any, variable: Any, translator: Any, args: Any, kwargs: Any) -> Any:
    """Trace a call: the forward, and each tap before and after it."""
    module = variable.value
    hooks = _find_hooks(room, variable, translator)
    room.guard_to_detect_forward_monkeypatching(variable.source, module)
    with room.record_nn_module_stack(str(id(module)), variable.get_nn_module_stack_source(), translator, module):
        for hook, handle in hooks:
            if isinstance(hook, TracedEntry):
                _trace_entry(room, translator, hook, handle, hook.names.bind(tuple(args), kwargs))
        output = variable.call_method(translator, "forward", args, kwargs)
        for hook, handle in hooks:
            if isinstance(hook, TracedTap):
                _trace_after(room, translator, hook, handle, output)
    return output


def _guards_tables(variable: Any, translator: Any) -> bool:
    """Guard how many hooks each table has; tells whether there are as many as before tracing began."""
    here = [(variable, variable.value, table) for table in (*_HOOKS, *_OF_BACKWARD, *_MARKS)]
    of_all = [(translator.nn_modules_globals_vt, modules, table) for table in _OF_ALL]
    return all(
        _read_length(each, translator, table) == len(getattr(owner, table)) for each, owner, table in here + of_all
    )


def _read_length(variable: Any, translator: Any, name: str) -> int:
    """Have the compiler read a table of hooks. From torch 2.15 on the method that does it has another name."""
    read: Callable[..., Any] = getattr(variable, "tp_getattro_impl", None) or variable.var_getattr
    length: int = _realize(read(translator, name)).len()
    return length


def _find_hooks(room: Any, variable: Any, translator: Any) -> list[tuple[TracedHook, Any]]:
    """The hooks that are traced, each with its handle in the graph, and a guard on the class of each hook."""
    found = []
    for name in _HOOKS:
        table = room.AttrSource(variable.source, name)
        hooks = dict.items(getattr(variable.value, name))  # in the order of the keys that are guarded
        for place, (number, hook) in enumerate(hooks):
            source = room.DictGetItemSource(table, room.ConstDictKeySource(table, place))
            room.VariableTracker.build(translator, hook, source=source, realize=True)
            if isinstance(hook, TracedHook):
                if number in (TAP, TAP_OF_WRAPPER):  # what is of this class has this number, and is found sooner by it
                    source = room.DictGetItemSource(table, number)
                handle = room.AttrSource(source, "handle")
                found.append((hook, room.VariableTracker.build(translator, hook.handle, source=handle, realize=True)))
    return found


def _trace_after(room: Any, translator: Any, hook: TracedTap, handle: Any, output: Any) -> None:
    output = _realize(output)
    if _is_plain_tensor(room, output):
        hook.put(translator.output.create_proxy, handle.as_proxy(), output.as_proxy(), torch.is_grad_enabled())
        return
    room.variables.UserFunctionVariable(hook.trace).call_function(translator, [handle, output], {})


def _trace_entry(room: Any, translator: Any, hook: TracedEntry, handle: Any, arguments: dict[str, Any]) -> None:
    variables = room.variables
    found = {name: _realize(value) for name, value in arguments.items() if type(value) is not tuple}
    tensors = {name: value for name, value in found.items() if not isinstance(value, variables.ConstantVariable)}
    if len(found) == len(arguments) and all(_is_plain_tensor(room, value) for value in tensors.values()):
        proxies = {name: value.as_proxy() for name, value in tensors.items()}
        hook.put(translator.output.create_proxy, handle.as_proxy(), proxies, torch.is_grad_enabled())
        return
    nest = {
        variables.ConstantVariable.create(name): variables.TupleVariable(list(value)) if type(value) is tuple else value
        for name, value in arguments.items()
    }
    trace = variables.UserFunctionVariable(hook.trace)
    trace.call_function(translator, [handle, variables.ConstDictVariable(nest)], {})


def _realize(variable: Any) -> Any:
    return variable.realize() if hasattr(variable, "realize") else variable


def _is_plain_tensor(room: Any, variable: Any) -> bool:
    is_tensor = type(variable) is room.variables.TensorVariable and variable.python_type() is Tensor
    return is_tensor and not has_transform()


def _guard_missing_taps(room: ModuleType) -> Undo:
    """Have torch guard that a module has no forward hook, whatever its class is."""
    owner: Any = vars(room)["GuardBuilder"]
    original = owner.EMPTY_NN_MODULE_HOOKS_DICT

    @functools.wraps(original)
    def guard_table(self: Any, guard: Any) -> None:
        if guard.name.endswith("_forward_hooks"):
            self.SEQUENCE_LENGTH(guard)
        else:
            original(self, guard)

    return replace(owner, "EMPTY_NN_MODULE_HOOKS_DICT", guard_table)


def _trust_handles(room: ModuleType) -> Undo:
    """Have torch not guard of which kind handles are: a hook of a class that is guarded has no other."""
    owner: Any = vars(room)["GuardBuilder"]
    original = owner.TENSOR_MATCH

    @functools.wraps(original)
    def guard_tensor(self: Any, guard: Any, value: Any = None) -> None:
        if not (guard.name.endswith(".handle") and is_handle(self.get(guard))):
            original(self, guard, value)

    return replace(owner, "TENSOR_MATCH", guard_tensor)


tapped_calls = Patch(
    lambda: [
        when_loaded(_CALLS, _shorten_calls),
        when_loaded(_GUARDS, _guard_missing_taps),
        when_loaded(_GUARDS, _trust_handles),
        watch_exports(),
        tap_roots(),
    ]
)
"""While somebody holds it, calls of modules with nothing but taps are traced in short, and guarded."""
