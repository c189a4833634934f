"""A function, or the ``apply`` of an autograd ``Function``, as a module, so that it can be checked like one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class PlainFunction(nn.Module):
    """Calls a function.

    Args:
        function: the function.

    Attributes:
        name: what it is called, in letters that a path may have.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        owner = getattr(function, "__self__", None)
        is_apply = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
        plain = getattr(owner if is_apply else function, "__name__", type(function).__name__)
        self.name = "".join(letter for letter in plain if letter.isalnum() or letter == "_")
        self.forward = _with_names_of(owner, function) if is_apply else function


def _with_names_of(kind: Any, apply: Callable[..., Any]) -> Callable[..., Any]:
    """``apply``, with the names of the arguments of the Function's forward; torch gives it none."""

    def call(*args: Any) -> Any:
        return apply(*args)

    parameters = list(inspect.signature(kind.forward).parameters.values())
    has_context = kind.setup_context is torch.autograd.Function.setup_context
    call.__signature__ = inspect.Signature(parameters[has_context:])  # type: ignore[attr-defined]
    return call
