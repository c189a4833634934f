"""What a function mode is called with, in words: the function's name, its tensors, and its other arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

VALUES = frozenset(
    {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "__index__", "__complex__"}
)
"""Functions that bring numbers out of torch, where no graph can follow."""

_PROPERTIES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes of a tensor that are tensors made of it."""

_UNINTERESTING = frozenset(
    {"backward", "grad", "register_hook", "retain_grad", "requires_grad_", "is_nonzero", "__repr__", "__format__"}
)

_OPERATORS = frozenset(
    {"getitem", "setitem", "rsub", "rdiv", "rtruediv", "rpow", "rmod", "rmatmul", "rfloordiv", "radd", "rmul", "pow",
     "ipow", "neg", "contains", "iter", "reversed", "invert", "and", "or", "xor", "iand", "ior", "ixor"}
)  # fmt: skip

_ALONG = frozenset(
    {"softmax", "log_softmax", "logsumexp", "sum", "mean", "std", "var", "prod", "argmax", "argmin", "max", "min",
     "amax", "amin", "cumsum", "cumprod", "norm", "squeeze", "unsqueeze", "median", "mode", "unbind", "all", "any",
     "nansum", "nanmean", "std_mean", "var_mean"}
)  # fmt: skip
"""Functions whose first argument that is not a tensor is a dimension, if it is a number or several."""

_SHORTEST, _LONGEST = 40, 160
_MANY = 4096

_names: dict[Any, str] = {}
_described: dict[Any, str] = {}


def name_function(function: Any) -> str:
    """The name of a torch function, ``getitem`` for ``__getitem__``; empty for one that makes nothing of interest."""
    try:
        known = _names.get(function)
    except TypeError:  # somebody's own, that cannot be hashed
        return _name(function)
    if known is None:
        if len(_names) > _MANY:
            _names.clear()
        known = _names[function] = _name(function)
    return known


def _name(function: Any) -> str:
    name = str(getattr(function, "__name__", ""))
    if name == "__get__":
        name = str(getattr(getattr(function, "__self__", None), "__name__", ""))
        return name if name in _PROPERTIES else ""
    plain = name.strip("_") if name.startswith("__") else name
    if name in _UNINTERESTING or name in ("__set__", "__delete__"):
        return ""
    return plain if plain in _OPERATORS else name


def is_bare(name: str) -> bool:
    """Whether a function takes of its operand no more than its shape: ``zeros_like``, ``new_ones``."""
    return name.endswith("_like") or name.startswith("new_")


def tensors_of(args: Any, kwargs: Mapping[str, Any] | None) -> list[Tensor]:
    """The tensors among arguments, in their order, with those in tuples and lists."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(tensors_of(value, None))
    return found


def describe_tensor(tensor: Tensor) -> str:
    """Its type and shape: ``float32[4, 3]``."""
    if tensor.is_nested:
        return f"nested_{_short(tensor.dtype)}"
    if is_lazy(tensor):
        return _short(tensor.dtype)  # it has no shape yet
    key = tensor.dtype, tensor.shape
    known = _described.get(key)
    if known is None:
        if len(_described) > _MANY:
            _described.clear()
        known = _described[key] = f"{_short(tensor.dtype)}{list(map(int, tensor.shape))}"
    return known


def describe_arguments(name: str, args: Any, kwargs: Mapping[str, Any] | None) -> str:
    """What is not a tensor: ``dim=-1, keepdim=True``; None is left out."""
    plain = [each for each in args if not isinstance(each, Tensor) and each is not None]
    given = [_short(each) for each in plain]
    if plain and name in _ALONG and isinstance(plain[0], int | list | tuple) and not isinstance(plain[0], bool):
        given[0] = f"dim={given[0]}"
    if kwargs:
        given += [f"{key}={_short(each)}" for key, each in kwargs.items() if each is not None and not _is_tensor(each)]
    text = ", ".join(given)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _short(value: Any) -> str:
    match value:
        case bool() | int() | float() | complex() | None:
            return repr(value)
        case str():
            return value[:_SHORTEST]
        case torch.dtype():
            return str(value).removeprefix("torch.")
        case list() | tuple():
            inner = ", ".join(map(_short, value[:8]))
            return f"({inner}{', …' if len(value) > 8 else ''})"
        case slice():
            parts = (value.start, value.stop, value.step)
            return ":".join("" if each is None else _short(each) for each in parts[: 2 + (parts[2] is not None)])
        case _ if value is Ellipsis:
            return "..."
        case Tensor():
            return "tensor"
        case torch.device() | torch.layout() | torch.memory_format():
            return str(value)
        case _:
            return type(value).__name__
