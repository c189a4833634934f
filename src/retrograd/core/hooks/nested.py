"""The tensors in what a module takes or returns, each with the keys that lead to it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from retrograd.core.hooks.engine import is_compiling

Keys = tuple[str, ...]


def flatten(value: Any, keys: Keys, inside: tuple[Any, ...] = ()) -> Iterator[tuple[Keys, torch.Tensor]]:
    """Tensors of nested tuples, lists, named tuples, mappings and dataclasses, in order, with their keys.

    Args:
        value: the nest.
        keys: the keys that lead to it.
        inside: the nests that it lies in; one that holds itself is entered once.
    """
    if isinstance(value, torch.Tensor):
        yield keys, value
    elif is_compiling() or not any(value is outer for outer in inside):  # torch.compile cannot compare them
        for key, item in _items(value):
            yield from flatten(item, (*keys, key), (*inside, value))


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key), item
    elif isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", None) or range(len(value))
        for key, item in zip(names, value, strict=False):
            yield str(key), item
    elif value is None:
        return  # torch 2.11 cannot compile the next question, asked of None
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name)


def replace_tensors(value: Any, keys: Keys, replacements: Mapping[Keys, torch.Tensor]) -> Any:
    """A nest with other tensors in some places; what holds none of them is the same object as before.

    Args:
        value: the nest.
        keys: the keys that lead to it.
        replacements: the new tensors, by the keys under which :func:`flatten` finds the old ones.
    """
    if isinstance(value, torch.Tensor):
        return replacements.get(keys, value)
    if not any(each[: len(keys)] == keys for each in replacements):
        return value
    items = [replace_tensors(item, (*keys, key), replacements) for key, item in _items(value)]
    return _with_items(value, items)


def is_among(tensor: torch.Tensor, nest: Any) -> bool:
    """Return whether a tensor is one of those in a nest."""
    return any(tensor is each for _, each in flatten(nest, ()))


def _with_items(value: Any, items: list[Any]) -> Any:
    if type(value) is dict:
        return dict(zip(value, items, strict=True))
    if isinstance(value, tuple):
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    changed = copy.copy(value)
    if isinstance(value, Mapping):
        for key, item in zip(value, items, strict=True):
            changed[key] = item
    elif isinstance(value, list):
        changed[:] = items
    else:
        for field, item in zip(dataclasses.fields(value), items, strict=True):
            object.__setattr__(changed, field.name, item)  # frozen ones too
    return changed
