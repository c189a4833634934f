"""The parts of a module, read from where torch keeps them.

Nothing is asked of the module: a class may have methods of its own for what torch offers (``parameters``,
``children``), or a ``__getattr__``, and any of them may raise; while a module is constructed nearly all of them do.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from retrograd.core.hooks.engine import is_transformed


def is_complete(module: nn.Module) -> bool:
    """True if the constructor of ``nn.Module`` has run."""
    return "_modules" in vars(module) and "_parameters" in vars(module)


def children_of(module: nn.Module) -> list[nn.Module]:
    """The submodules that a module has itself."""
    return [child for child in list(vars(module).get("_modules", {}).values()) if child is not None]


def modules_of(model: nn.Module) -> Iterator[nn.Module]:
    """A module and all within it, parents before children, each once."""
    seen: set[int] = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            waiting.extend(reversed(children_of(module)))


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of this module run as compiled code, so that hooks on the modules within it do not."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def has_compiled_part(model: nn.Module) -> bool:
    """Return whether a part of this model goes through torch.compile."""
    return any(map(is_compiled, modules_of(model)))


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module, without those of its children."""
    return [each for each in list(vars(module).get("_parameters", {}).values()) if each is not None]


def parameters_of(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a module and of all within it, each once."""
    seen: set[int] = set()
    for module in modules_of(model):
        for parameter in own_parameters(module):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def has_other_weights(model: nn.Module) -> bool:
    """True while ``functional_call`` runs a model, with tensors in the place of its parameters."""
    return any(is_transformed(each) or type(each) is torch.Tensor for each in parameters_of(model))


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """What ``.grad`` of a leaf holds. Of any other tensor torch warns who asks, and there is nothing to read."""
    return parameter.grad if parameter.is_leaf else None
