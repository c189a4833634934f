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
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from retrograd.hooks.compiled import when_loaded
from retrograd.hooks.compiled_taps import put_tap, trace_tap
from retrograd.hooks.engine import has_transform
from retrograd.hooks.listeners import Hook, Patch, Undo, replace

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


class TracedTap(Hook):
    """A hook after forwards which is one operation where it is traced.

    Attributes:
        handle: by which graphs know it.
    """

    __slots__ = ("handle",)

    handle: Tensor


class UntracedHook(Hook):
    """A hook on a module that does nothing where it is traced."""

    __slots__ = ()


_OURS = (TracedTap, UntracedHook)


def has_taps_alone(module: nn.Module) -> bool:
    """Tell whether the call of a module is torch's own, and nothing that is traced is among its hooks but taps."""
    kind = type(module)
    return (
        kind.__call__ is nn.Module.__call__
        and kind._call_impl is nn.Module._call_impl
        and any(isinstance(hook, TracedTap) for hook in module._forward_hooks.values())
        and all(isinstance(hook, _OURS) for table in _HOOKS for hook in getattr(module, table).values())
        and not any(getattr(module, table) for table in _OF_BACKWARD)
        and not any(getattr(modules, table) for table in _OF_ALL)
        and "__call__" not in module.__dict__
        and "_call_impl" not in module.__dict__
        and "forward" not in module.__dict__
        and isinstance(getattr_static(module, "forward"), FunctionType)
    )


def _shorten_calls(room: ModuleType) -> Undo:
    """Have torch's stand-in for a module go past the search for hooks."""
    rooms: Any = room
    owner = rooms.UnspecializedNNModuleVariable
    original = owner.call_function

    @functools.wraps(original)
    def call_function(self: Any, translator: Any, args: Any, kwargs: Any) -> Any:
        is_short = self.source is not None and has_taps_alone(self.value) and not rooms.is_lazy_module(self.value)
        if is_short and _guards_tables(self, translator):
            return _trace_call(rooms, self, translator, args, kwargs)
        return original(self, translator, args, kwargs)

    return replace(owner, "call_function", call_function)


def _trace_call(room: Any, variable: Any, translator: Any, args: Any, kwargs: Any) -> Any:
    """Trace a call: the forward, and each tap after it."""
    module = variable.value
    handles = _find_handles(room, variable, translator)
    room.guard_to_detect_forward_monkeypatching(variable.source, module)
    with room.record_nn_module_stack(str(id(module)), variable.get_nn_module_stack_source(), translator, module):
        output = variable.call_method(translator, "forward", args, kwargs)
        for handle in handles:
            _trace_tap(room, translator, handle, output)
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
    table = read(translator, name)
    length: int = (table.realize() if hasattr(table, "realize") else table).len()
    return length


def _find_handles(room: Any, variable: Any, translator: Any) -> list[Any]:
    """The handle of each tap, and a guard on the class of each hook."""
    handles = []
    for name in _HOOKS:
        table = room.AttrSource(variable.source, name)
        hooks = dict.values(getattr(variable.value, name))  # in the order of the keys that are guarded
        for place, hook in enumerate(hooks):
            source = room.DictGetItemSource(table, room.ConstDictKeySource(table, place))
            room.VariableTracker.build(translator, hook, source=source, realize=True)
            if isinstance(hook, TracedTap):
                handle = room.AttrSource(source, "handle")
                handles.append(room.VariableTracker.build(translator, hook.handle, source=handle, realize=True))
    return handles


def _trace_tap(room: Any, translator: Any, handle: Any, output: Any) -> None:
    output = output.realize() if hasattr(output, "realize") else output
    if type(output) is room.variables.TensorVariable and output.python_type() is Tensor and not has_transform():
        put_tap(translator.output.create_proxy, output.as_proxy(), handle.as_proxy(), trains=torch.is_grad_enabled())
        return
    room.variables.UserFunctionVariable(trace_tap).call_function(translator, [handle, output], {})


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


tapped_calls = Patch(lambda: [when_loaded(_CALLS, _shorten_calls), when_loaded(_GUARDS, _guard_missing_taps)])
"""While somebody holds it, calls of modules with nothing but taps are traced in short, and guarded."""
