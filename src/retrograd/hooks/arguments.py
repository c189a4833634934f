"""What the arguments of a module are called."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

_NO_TENSORS = frozenset({"bool", "int", "str", "None"})


class ArgumentNames:
    """Names what a module is called with.

    Args:
        module: the module, which is not held.

    Attributes:
        names: those of its positional arguments.
        rest: the name under which further ones go.
    """

    __slots__ = ("names", "rest")

    def __init__(self, module: nn.Module) -> None:
        parameters = _parameters_of(module)
        self.names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by their names."""
        bound = dict(zip(self.names, args, strict=False))
        if len(args) > len(self.names):
            bound[self.rest] = args[len(self.names) :]
        bound.update(kwargs)
        return bound

    def unbind(
        self, bound: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Named arguments in the form of this call, which they take the place of."""
        names = self.names[: len(args)]
        rest = bound[self.rest] if len(args) > len(names) else ()
        return (*(bound[name] for name in names), *rest), {name: bound[name] for name in kwargs}


def spread_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model is called with: a tuple or list holds arguments, a mapping named ones; else it is the only one."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if type(batch) in (tuple, list) else ((batch,), {})  # a named tuple is one argument


def known_arguments(module: nn.Module) -> tuple[list[str], bool]:
    """Names of all arguments that a module is known to take, and whether it takes others too.

    Those are left out that are annotated as something else than tensors.
    """
    parameters = _parameters_of(module)
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = [p.name for p in named if not _is_no_tensor(p.annotation)]
    return names, len(named) < len(parameters) or not parameters


def _is_no_tensor(annotation: object) -> bool:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation).removeprefix("typing.")
    parts = re.split(r"\s*\|\s*", text.removeprefix("Optional[").removesuffix("]"))
    return all(part in _NO_TENSORS for part in parts) and parts != ["None"]


def _parameters_of(module: nn.Module) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):  # a forward written in C tells nothing
        return []
