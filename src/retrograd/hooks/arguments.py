"""What the arguments of a module are called."""

from __future__ import annotations

import inspect

from torch import nn


def argument_names(module: nn.Module) -> tuple[list[str], str]:
    """Names of a module's positional arguments, and the name under which further ones go."""
    parameters = _parameters_of(module)
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    return names, rest


def known_arguments(module: nn.Module) -> tuple[list[str], bool]:
    """Names of all arguments that a module is known to take, and whether it takes others too."""
    parameters = _parameters_of(module)
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return names, len(names) < len(parameters) or not parameters


def _parameters_of(module: nn.Module) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):  # a forward written in C tells nothing
        return []
