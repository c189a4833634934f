"""What the arguments of a module are called."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

_NO_TENSORS = frozenset({"bool", "int", "str", "None"})


def argument_names(module: nn.Module) -> tuple[list[str], str]:
    """Names of a module's positional arguments, and the name under which further ones go."""
    parameters = _parameters_of(module)
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    return names, rest


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
