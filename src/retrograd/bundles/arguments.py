"""Arguments and results of operations in the terms of JSON; tensors go by numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_NAMED = (torch.dtype, torch.layout, torch.memory_format)
"""Kinds of argument that are constants of torch, written by their names."""


_SPECIAL = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


class UnwritableArgumentError(TypeError):
    """An argument of an operation cannot be written down."""


def encode(value: Any, number_of: Callable[[Tensor], int]) -> Any:
    """An argument or result of an operation in the terms of JSON.

    Args:
        value: the argument or result.
        number_of: gives the number of a tensor.

    Raises:
        UnwritableArgumentError: for things that live in this process alone.
    """
    match value:
        case None | bool() | str():
            return value
        case int() | torch.SymInt():
            return int(value)
        case float() | torch.SymFloat():
            return _encode_float(float(value))
        case complex():
            return {"complex": [_encode_float(value.real), _encode_float(value.imag)]}
        case Tensor():
            return {"tensor": number_of(value)}
        case torch.Size() | list():
            return [encode(part, number_of) for part in value]
        case tuple():
            return {"tuple": [encode(part, number_of) for part in value]}
        case torch.device():
            return {"device": str(value)}
        case _ if isinstance(value, _NAMED):
            return {type(value).__name__: str(value).removeprefix("torch.")}
        case _:
            raise UnwritableArgumentError(f"a {type(value).__module__}.{type(value).__qualname__}")


def decode(data: Any, tensors: Mapping[int, Any]) -> Any:
    """What :func:`encode` wrote.

    Raises:
        ValueError: it wrote no such thing.
        KeyError: there is no tensor of that number.
    """
    match data:
        case None | bool() | int() | float() | str():
            return data
        case list():
            return [decode(part, tensors) for part in data]
        case {"tensor": int(number)}:
            return tensors[number]
        case {"tuple": list(parts)}:
            return tuple(decode(part, tensors) for part in parts)
        case {"float": str(text)}:
            return _SPECIAL[text]
        case {"complex": [real, imaginary]}:
            return complex(decode(real, tensors), decode(imaginary, tensors))
        case {"device": str(text)}:
            return torch.device(text)
        case _:
            return _decode_constant(data)


def bind(form: Any, value: Any, tensors: dict[int, Any]) -> None:
    """Number the tensors of a result.

    Args:
        form: the result as :func:`encode` wrote it when it was recorded.
        value: the result now.
        tensors: number → tensor, to add to.
    """
    match form:
        case {"tensor": int(number)}:
            tensors[number] = value
        case list() | {"tuple": list()}:
            parts = form if isinstance(form, list) else form["tuple"]
            for part, each in zip(parts, value, strict=False):
                bind(part, each, tensors)


def _encode_float(value: float) -> Any:
    if value != value:
        return {"float": "nan"}
    return {"float": str(value)} if str(value) in _SPECIAL else value


def _decode_constant(data: Any) -> Any:
    if isinstance(data, dict) and len(data) == 1:
        [(kind, name)] = data.items()
        found = getattr(torch, str(name), None)
        if isinstance(found, _NAMED) and type(found).__name__ == kind:
            return found
    raise ValueError(f"{data!r} is not an argument of an operation")
