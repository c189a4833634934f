"""The structure of a recorded model as plain data."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from retrograd.core.hooks.discovery import construction_line
from retrograd.core.hooks.names import walk_modules

_MOST_SETTINGS = 300
"""Characters of what a module shows of itself."""


def describe_model(name: str, model: nn.Module) -> list[dict[str, Any]]:
    """The structure of a model as plain data: a row a module.

    Returns:
        Of each ``path``, ``type``, number of own ``parameters`` and of those that are ``trainable``, their ``dtype``
        and ``shapes`` by name, ``settings`` as it shows them itself, and the ``line`` that constructed it; empty where
        they are not known. The model itself comes first, and is marked as ``root``.
    """
    described: list[dict[str, Any]] = [
        {
            "path": entry.path,
            "type": type(entry.module).__name__,
            "parameters": sum(_size(parameter) for _, parameter in entry.parameters),
            "trainable": sum(_size(parameter) for _, parameter in entry.parameters if parameter.requires_grad),
            "dtype": ", ".join(dict.fromkeys(str(each.dtype).removeprefix("torch.") for _, each in entry.parameters)),
            "shapes": {name: list(each.shape) for name, each in entry.parameters if not is_lazy(each)},
            "settings": _show_settings(entry.module),
            "line": construction_line(entry.module),
        }
        for entry in walk_modules(name, model)
    ]
    for root in described[:1]:
        root["root"] = True
    return described


def _show_settings(module: nn.Module) -> str:
    try:
        text = module.extra_repr()
    except Exception:  # the user's own, of a module that may not be complete
        return ""
    return text[:_MOST_SETTINGS] if isinstance(text, str) else ""


def _size(parameter: Tensor) -> int:
    return 0 if is_lazy(parameter) else parameter.numel()
