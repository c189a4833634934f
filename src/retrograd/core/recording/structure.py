"""The structure of a recorded model as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from retrograd.core.hooks.discovery import construction_line
from retrograd.core.hooks.names import walk_modules
from retrograd.core.hooks.parts import parameters_of
from retrograd.core.identities import IdentitySet

_MOST_SETTINGS = 300
"""Characters of what a module shows of itself."""


def describe_model(name: str, model: nn.Module) -> list[dict[str, Any]]:
    """The structure of a model as plain data: a row a module.

    Returns:
        Of each ``path``, ``type``, number of own ``parameters`` and of those that are ``trainable``, of which tied ones
        count where they come first, their ``dtype``
        and ``shapes`` by name, ``settings`` as it shows them itself, and the ``line`` that constructed it; empty where
        they are not known. The model itself comes first, and is marked as ``root``.
    """
    entries, seen = walk_modules(name, model), IdentitySet[nn.Parameter]()
    described: list[dict[str, Any]] = [
        {
            "path": entry.path,
            "type": type(entry.module).__name__,
            **_count(seen, [parameter for _, parameter in entry.parameters]),
            "dtype": ", ".join(dict.fromkeys(str(each.dtype).removeprefix("torch.") for _, each in entry.parameters)),
            "shapes": {name: list(each.shape) for name, each in entry.parameters if not is_lazy(each)},
            "settings": _show_settings(entry.module),
            "line": construction_line(entry.module),
        }
        for entry in entries
    ]
    for root in described[:1]:
        root["root"] = True
    return described


def count_parameters(models: Iterable[nn.Module]) -> int:
    """Elements of the parameters of some models, each tensor once."""
    every = IdentitySet(parameter for model in models for parameter in parameters_of(model))
    return sum(map(_size, every))


def _count(seen: IdentitySet[nn.Parameter], parameters: list[nn.Parameter]) -> dict[str, int]:
    new = [each for each in parameters if each not in seen]
    seen.update(new)
    return {"parameters": sum(map(_size, new)), "trainable": sum(_size(each) for each in new if each.requires_grad)}


def _show_settings(module: nn.Module) -> str:
    try:
        text = module.extra_repr()
    except Exception:  # the user's own, of a module that may not be complete
        return ""
    return text[:_MOST_SETTINGS] if isinstance(text, str) else ""


def _size(parameter: Tensor) -> int:
    return 0 if is_lazy(parameter) else parameter.numel()
