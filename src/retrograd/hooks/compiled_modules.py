"""Hooks of ours on modules that were compiled in place, by ``module.compile()``.

From torch 2.14 on the compiler takes the hooks of such a module into the graph, where ours have nothing to see. So they
stand in tables of their own, and are called around the compiled call: outside of all hooks of the program's.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn

from retrograd.hooks.engine import is_compiling, uncompiled_itself
from retrograd.hooks.versions import TORCH

_HOOKS_ARE_COMPILED = TORCH >= (2, 14)


def tables_of(module: nn.Module) -> Any:
    """What has the tables of forward hooks, by torch's names, from which hooks of ours on a module are called."""
    call = module._compiled_call_impl
    if call is None or not _HOOKS_ARE_COMPILED:
        return module
    if not isinstance(call, _CompiledCall):
        call = _CompiledCall(module, call)
        module._compiled_call_impl = call  # not a part of the module's state
    return call


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
        """Call the hooks behind it; returns the output."""
        for number, hook in tuple(self._forward_hooks.items()):
            given = (args, kwargs) if number in self._forward_hooks_with_kwargs else (args,)
            changed = hook(self._module, *given, output)
            output = output if changed is None else changed
        return output

    def after_failure(self, args: Any) -> None:
        """Call those that are always called."""
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
