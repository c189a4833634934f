"""Paths of modules and names of what they hold, without what wrappers put in: DDP, FSDP, compilers, checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

import torch
from torch import nn

from retrograd.sites.site import ROOT, Site

REPLICATING = frozenset({"DistributedDataParallel", "DataParallel"})
"""Types of wrappers whose one part is called ``module``."""

_WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_SLOTS = frozenset({"output", "input", "parameter", "outputs", "inputs", "parameters"})


def walk_paths(name: str, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, parents before children, with its path; the empty text for a model without a name.

    A wrapper has the path of what it wraps.
    """
    seen: set[int] = set()
    waiting = [(name, model)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        children = [
            (_join(path, module, key), child) for key, child in module._modules.items() if isinstance(child, nn.Module)
        ]
        waiting.extend(reversed(children))


def parameter_site(path: str, name: str) -> Site:
    """The site of a module's parameter. One that is called like a slot, or like all of them, does not get its name."""
    return Site(path, ("parameter", name) if name in _SLOTS else (name,))


def walk_parameters(models: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of some named models with its name, ``"blocks.3.fc:weight"``; tied ones with all of theirs."""
    for prefix, model in models:
        for path, module in walk_paths(prefix, model):
            for key, parameter in list(module._parameters.items()):
                if parameter is not None:
                    yield _name_parameter(path, key), parameter


def walk_buffers(models: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every buffer of some named models with its name, as a parameter would have it."""
    for prefix, model in models:
        for path, module in walk_paths(prefix, model):
            for key, buffer in list(module._buffers.items()):
                if buffer is not None:
                    yield _name_parameter(path, key), buffer


@lru_cache(maxsize=1 << 14)
def _name_parameter(path: str, key: str) -> str:
    return str(parameter_site(path or ROOT, key))


def _join(path: str, module: nn.Module, key: str) -> str:
    is_wrapped = key in _WRAPPED or (key == "module" and type(module).__name__ in REPLICATING)
    return path if is_wrapped else f"{path}.{key}" if path else key
