"""Hooks that see every module, parameter and optimizer of the process, and where they were constructed.

The hook on forward calls costs a little for every call of every module, so it stands only while its listener wants
it. The others fire when a model is built and when an optimizer updates, and stay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, FunctionType
from typing import Any, Protocol
from weakref import WeakSet

from torch import nn
from torch.nn.modules import module as modules
from torch.optim.optimizer import Optimizer

from retrograd.core.frames import read_locals
from retrograd.core.hooks.compiled import compiled_call_listeners, is_exporting
from retrograd.core.hooks.engine import grad_enabled, is_compiling, is_tracing, uncompiled, uncompiled_itself
from retrograd.core.hooks.listeners import HookEntry, Patch, Undo, wrap_method
from retrograd.core.hooks.module import ModuleHooks
from retrograd.core.hooks.optimizer import update_scouts
from retrograd.core.hooks.torch_calls import describe_frame, program_frame
from retrograd.core.identities import IdentityDict


class DiscoveryListener(Protocol):
    """Notified of what a program builds and runs."""

    def module_joins(self, parent: nn.Module, child: nn.Module) -> None:
        """``child`` becomes a submodule of ``parent``."""

    def parameter_made(self, module: nn.Module) -> None:
        """A parameter is given to ``module``: a model is being built."""

    def module_called(self, module: nn.Module) -> None:
        """``module`` is about to run, with grad mode on. Told only while discovery is armed."""

    def compiled_function_called(self) -> None:
        """A compiled function that is no module runs for the first time. Told only while discovery is armed."""

    def parameters_given(self, optimizer: Optimizer) -> None:
        """An optimizer has got parameters, from its constructor or later."""

    def update_begins(self, optimizer: Optimizer, has_closure: bool) -> None:
        """``optimizer.step`` was called; nobody who listens to updates knows yet."""

    def discovery_failed(self, about: object, error: Exception) -> None:
        """A method of this listener has raised, about this; it is notified of all else as before."""


class ModelDiscovery:
    """The process-wide hooks on behalf of one listener.

    Attributes:
        blind_call: ``file:line`` of the first call of a module with gradients switched off; empty where none was seen.
    """

    def __init__(self, listener: DiscoveryListener) -> None:
        self._listener = listener
        self._is_stopped = False
        self.blind_call = ""
        self._calls: ModuleHooks | None = None
        self._functions: WeakSet[FunctionType] = WeakSet()
        self._standing = [
            HookEntry(self._join, modules._global_module_registration_hooks),
            HookEntry(self._give, modules._global_parameter_registration_hooks),
        ]
        self._take_back = wrap_method(Optimizer, "add_param_group", self._add_group)
        update_scouts.add(self)

    @property
    def armed(self) -> bool:
        """True if forward calls are reported."""
        return self._calls is not None

    def arm(self) -> None:
        """Begin to tell of forward calls."""
        if self._calls is None and not self._is_stopped:
            self._calls = ModuleHooks(self._call)
            compiled_call_listeners.add(self)

    def disarm(self) -> None:
        """Stop notifying of forward calls."""
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.remove()
            compiled_call_listeners.remove(self)

    def stop(self) -> None:
        """Stop notifying. To be used from inside a hook, where torch may be walking through its tables."""
        self._is_stopped = True
        self.disarm()

    def close(self) -> None:
        """Take all hooks away."""
        self.stop()
        update_scouts.remove(self)
        self._take_back()
        while self._standing:
            self._standing.pop().remove()

    def update_begins(self, optimizer: Optimizer, has_closure: bool) -> None:
        self._tell(self._listener.update_begins, optimizer, has_closure)

    @uncompiled_itself
    def _add_group(self, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = original(optimizer, *args, **kwargs)
        self._tell(self._listener.parameters_given, optimizer)
        return result

    def _call(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if is_compiling() or is_tracing():
            return
        if not grad_enabled():
            self.blind_call = self.blind_call or describe_frame(program_frame(sys._getframe(1)))
            return
        before = set(module._forward_pre_hooks)
        self._tell(self._listener.module_called, module)
        if module._forward_pre_hooks.keys() - before:
            _catch_up(module, args, before)

    def compiled_call_begins(self, function: object, frame: FrameType) -> None:
        if not grad_enabled():
            return
        module = getattr(function, "__self__", None)
        if isinstance(module, nn.Module):
            self._tell(self._listener.module_called, module)
            return
        function = getattr(function, "__func__", function)
        if isinstance(function, FunctionType) and function not in self._functions:
            self._functions.add(function)  # to look for models takes long
            self._tell(self._listener.compiled_function_called)

    def compiled_call_ends(self) -> None:
        pass

    def _join(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            self._tell(self._listener.module_joins, parent, child)

    def _give(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            self._tell(self._listener.parameter_made, module)

    def _tell(self, tell: Callable[..., None], *about: Any) -> None:
        if self._is_stopped or is_exporting():
            return
        try:
            tell(*about)
        except Exception as error:  # a fault of ours must not stop the program
            self._listener.discovery_failed(about[0] if about else None, error)


def _catch_up(module: nn.Module, args: tuple[Any, ...], known: set[int]) -> None:
    """Run the pre-hooks that were set on a module while it was already being called: torch will not for this call."""
    kwargs = sys._getframe(2).f_locals.get("kwargs", {})  # torch tells a global hook of args alone
    new = [item for item in module._forward_pre_hooks.items() if item[0] not in known]
    for number, hook in new:
        if number in module._forward_pre_hooks_with_kwargs:
            hook(module, args, kwargs)
        else:
            hook(module, args)


_lines: IdentityDict[nn.Module | Optimizer, str] = IdentityDict()


def construction_line(thing: nn.Module | Optimizer) -> str:
    """``file:line`` of the program's call that made it; empty where that was not seen."""
    return _lines.get(thing, "")


def list_constructed() -> list[nn.Module | Optimizer]:
    """Modules and optimizers that were made while somebody was watching, the oldest first."""
    return list(_lines)


def constructed_optimizers() -> list[Optimizer]:
    """Optimizers that were made while somebody was watching and are complete, the oldest first."""
    return [thing for thing in list(_lines) if isinstance(thing, Optimizer) and "param_groups" in vars(thing)]


@uncompiled
def _joins(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    _note(parent)
    if child is not None:
        _note(child)


@uncompiled
def _given(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    _note(module)


def _note(module: nn.Module) -> None:
    """Record the line that constructs a module: what a module is given first, it is given by its constructor."""
    if is_compiling() or module in _lines:
        return
    frame: FrameType | None = sys._getframe(2)
    with suppress(Exception):  # torch would have the constructor raise it; then the line is not known
        while frame is not None and frame.f_back is not None and _is_its_own(frame, module):
            frame = frame.f_back
        if frame is not None:
            _lines[module] = describe_frame(program_frame(frame))


def _is_its_own(frame: FrameType, module: nn.Module) -> bool:
    """Return whether a frame is of a method of the module, or a library's between such ones."""
    names = frame.f_code.co_varnames
    return bool(names) and read_locals(frame).get(names[0]) is module


@uncompiled_itself
def _patched(original: Callable[..., Any], optimizer: Optimizer) -> Any:
    result = original(optimizer)
    if optimizer not in _lines:
        _lines[optimizer] = describe_frame(program_frame(sys._getframe(1)))
    return result


def _install() -> list[Undo]:
    return [
        HookEntry(_joins, modules._global_module_registration_hooks).remove,
        HookEntry(_given, modules._global_parameter_registration_hooks).remove,
        wrap_method(Optimizer, "_patch_step_function", _patched),
    ]


construction_watch = Patch(_install)
"""While somebody holds it, the lines that make modules and optimizers are noted."""
