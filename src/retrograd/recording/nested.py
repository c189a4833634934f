"""The tensors in what a module takes or returns, each with the keys that lead to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

Keys = tuple[str, ...]

_DEEPEST = 8
"""Nesting below which nothing is looked for: model outputs are shallow, and a cycle must end."""


def flatten(value: Any, keys: Keys) -> Iterator[tuple[Keys, torch.Tensor]]:
    """Tensors of nested tuples, lists, named tuples, mappings and dataclasses, in order, with their keys."""
    if isinstance(value, torch.Tensor):
        yield keys, value
    elif len(keys) <= _DEEPEST:
        for key, item in _items(value):
            yield from flatten(item, (*keys, key))


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
