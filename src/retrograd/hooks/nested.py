"""The tensors in what a module takes or returns, each with the keys that lead to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

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
    elif not any(value is outer for outer in inside):
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
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name)
