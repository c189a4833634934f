"""Functions of torch's, made of what a test says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd import Function


def make_function(forward: Callable[..., Any], backward: Callable[..., Any], name: str = "Odd") -> Any:
    """A ``torch.autograd.Function`` of these two, each of which is given ``ctx`` first; its node has this name."""
    return type(name, (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


def passing(backward: Callable[..., Any], name: str = "Odd") -> Callable[..., Any]:
    """What hands a tensor on, and in its backward returns what this makes of the gradient."""
    function = make_function(lambda ctx, x: x.clone(), lambda ctx, gradient: backward(gradient), name)
    return function.apply  # type: ignore[no-any-return]
