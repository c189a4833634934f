"""Whether what was read has the kinds that annotations say: JSON has no idea of them."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

MOST = 1 << 64
"""No whole number that we write is as large."""


def check_kinds(content: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Check the values of an object that are there.

    Args:
        content: what was read.
        kinds: key → annotation of its value.

    Raises:
        ValueError: one is of another kind.
    """
    for key, hint in kinds.items():
        if key in content and not fits(content[key], hint):
            raise ValueError(f"{key!r} cannot be {_shorten(content[key])}")


def check_fields(instance: Any) -> None:
    """Check the fields of a dataclass that was made of what was read.

    Raises:
        ValueError: one is not what its annotation says.
    """
    kind: Any = type(instance)
    for name, hint in _hints_of(kind):
        if not fits(getattr(instance, name), hint):
            raise ValueError(f"{name!r} cannot be {_shorten(getattr(instance, name))}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is what an annotation says."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in {Union, types.UnionType}:
        return any(fits(value, each) for each in inner)
    if origin is Literal:
        return value in inner
    if origin in {list, Sequence, tuple}:
        return _is_sequence_of(value, origin, inner)
    if origin in {dict, Mapping}:
        is_there = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
        return is_there and all(fits(each, inner[1]) for each in value.values())
    return _is_a(value, hint)


def _is_a(value: Any, kind: Any) -> bool:
    if kind is None or kind is type(None):
        return value is None
    if kind is int:
        return type(value) is int and -MOST < value < MOST
    if kind is float:
        return type(value) is float or _is_a(value, int)
    return isinstance(value, kind)


def _is_sequence_of(value: Any, origin: Any, inner: tuple[Any, ...]) -> bool:
    if origin is tuple and inner[-1] is not Ellipsis:
        return isinstance(value, tuple) and len(value) == len(inner) and all(map(fits, value, inner))
    if isinstance(value, str) or not isinstance(value, tuple if origin is tuple else Sequence):
        return False
    return all(fits(each, inner[0]) for each in value)


@cache
def _hints_of(kind: Any) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in fields(kind))


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
