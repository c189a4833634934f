"""Where modules and optimizers were constructed, as far as somebody was watching."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn
from torch.nn.modules import module as modules
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from retrograd.hooks.engine import is_compiling, uncompiled, uncompiled_itself
from retrograd.hooks.frames import describe_frame, program_frame
from retrograd.hooks.patches import Patch, Undo, wrap_method
from retrograd.hooks.tables import Entry

_lines = WeakIdKeyDictionary()


def construction_line(thing: nn.Module | Optimizer) -> str:
    """``file:line`` of the program's call that made it; empty where that was not seen."""
    return str(_lines.get(thing, ""))


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
    """What a module is given first, it is given by its constructor."""
    if is_compiling() or module in _lines:
        return
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_back is not None and _is_its_own(frame, module):
        frame = frame.f_back
    if frame is not None:
        _lines[module] = describe_frame(program_frame(frame))


def _is_its_own(frame: FrameType, module: nn.Module) -> bool:
    """Whether a frame is of a method of the module, or a library's between such ones."""
    names = frame.f_code.co_varnames
    return bool(names) and frame.f_locals.get(names[0]) is module


@uncompiled_itself
def _patched(original: Callable[..., Any], optimizer: Optimizer) -> Any:
    result = original(optimizer)
    if optimizer not in _lines:
        _lines[optimizer] = describe_frame(program_frame(sys._getframe(1)))
    return result


def _install() -> list[Undo]:
    return [
        Entry(_joins, modules._global_module_registration_hooks).remove,
        Entry(_given, modules._global_parameter_registration_hooks).remove,
        wrap_method(Optimizer, "_patch_step_function", _patched),
    ]


construction_watch = Patch(_install)
"""While somebody holds it, the lines that make modules and optimizers are noted."""
