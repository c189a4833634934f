"""Torch's decorators for ``forward`` and ``backward``, which take the first argument for ``ctx``.

On a method the first argument is ``self``. ``custom_fwd`` would keep the state of each call on the one instance, where
the next call overwrites it. So a decorated method is taken out of its decorators, and they are put round the static
method that torch calls.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import once_differentiable

from retrograd.errors import FunctionError

Method = Callable[..., Any]
Decorator = Callable[[Method], Method]

_KNOWN: tuple[Callable[..., Any], ...] = (once_differentiable, custom_fwd, custom_bwd)


def undecorate(owner: str, method: Method) -> tuple[Method, list[Decorator]]:
    """A method without the decorators of torch that are outermost on it, and those, the outermost first.

    Raises:
        FunctionError: another decorator lies around one of torch's.
    """
    decorators: list[Decorator] = []
    while (decorator := _decorator_of(method)) is not None:
        decorators.append(decorator)
        method = method.__wrapped__  # type: ignore[attr-defined]
    inner: Any = method
    while inner := getattr(inner, "__wrapped__", None):
        if _decorator_of(inner) is not None:
            raise FunctionError(
                f"{owner}.{method.__name__} has another decorator around one of torch.amp or torch.autograd.",
                repair="put torch's decorators on the lines above it.",
                reason="they take the first argument for ctx, and are moved to where it is.",
            )
    return method, decorators


def redecorate(method: Method, decorators: list[Decorator]) -> Method:
    """Put the decorators around another method, in their order."""
    for decorator in reversed(decorators):
        method = decorator(method)
    return method


def _decorator_of(method: Method) -> Decorator | None:
    """Which of torch's decorators made this function, with its options."""
    code = getattr(method, "__code__", None)
    for decorator in _KNOWN:
        if code in decorator.__code__.co_consts:  # the function that it defines and returns
            options = {
                name: value
                for name, value in inspect.getclosurevars(method).nonlocals.items()
                if name in inspect.signature(decorator).parameters and value is not method.__wrapped__  # type: ignore[attr-defined]
            }
            return functools.partial(decorator, **options)
    return None
