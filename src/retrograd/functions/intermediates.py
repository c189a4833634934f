"""What a Function saves that is neither an argument nor an output: to a second derivative it is a constant.

Autograd records nothing within ``forward``, so the derivative of what is computed there and saved is lost where the
backward is differentiated. Whether a class does so is found at its first call with gradients; from then on a call costs
what it did. Nothing is raised before such a gradient is differentiated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from retrograd.errors import FunctionError
from retrograd.hooks.derived import DerivedTensors
from retrograd.hooks.engine import grad_enabled, is_compiling, uncompiled
from retrograd.hooks.functions import transforms_active

Method = Callable[..., Any]


class IntermediateCheck:
    """Finds whether a Function saves what it has computed of its arguments, and refuses its second derivative then.

    Args:
        owner: name of the Function.

    Attributes:
        forward_code, backward_code: functions whose global ``method`` is what the user wrote; empty where the methods
            are called through those that are made here.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._is_known = False
        self._found = ""
        self.forward_code: Method | None = None
        self.backward_code: Method | None = None

    def first(self, method: Method) -> Method:
        """The user's ``forward``, watched until it is known what it saves."""

        @functools.wraps(method)
        @uncompiled
        def forward(function: Any, ctx: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_known or is_compiling() or transforms_active is None or transforms_active():
                return method(function, ctx, *args, **kwargs)
            given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            sources = [each for each in given if each.requires_grad]
            if not sources:
                return method(function, ctx, *args, **kwargs)
            with DerivedTensors(sources) as derived:
                output = method(function, ctx, *args, **kwargs)
            outputs = output if isinstance(output, tuple) else (output,)
            known = set(map(id, (*given, *outputs)))
            kept = _list_kept(ctx)
            self._found = next((name for name, each in kept if id(each) not in known and derived.holds(each)), "")
            self._settle(method)
            return output

        return forward

    def guard(self, method: Method) -> Method:
        """The user's ``backward``, whose gradients cannot be differentiated where that would lose a part."""

        @functools.wraps(method)
        @uncompiled
        def backward(function: Any, ctx: Any, *gradients: Any) -> Any:
            returned = method(function, ctx, *gradients)
            return self._refuse(returned) if self._found and grad_enabled() else returned

        return backward

    def _settle(self, method: Method) -> None:
        self._is_known = True
        if self.forward_code is not None:
            self.forward_code.__globals__["method"] = method
        if self._found and self.backward_code is not None:
            of_code = self.backward_code.__globals__
            of_code["method"] = self.guard(of_code["method"])

    def _refuse(self, returned: Any) -> Any:
        values = list(returned.values()) if isinstance(returned, dict) else returned
        several = list(values) if isinstance(values, list | tuple) else [values]
        places = [place for place, each in enumerate(several) if isinstance(each, Tensor) and each.is_floating_point()]
        if not places:
            return returned
        given = [
            each if each.requires_grad else each.detach().requires_grad_() for each in map(several.__getitem__, places)
        ]
        refused = _Refused.apply(self, *given)  # type: ignore[no-untyped-call]
        for place, each in zip(places, refused, strict=True):
            several[place] = each
        if isinstance(returned, dict):
            return dict(zip(returned, several, strict=True))
        return tuple(several) if isinstance(returned, tuple) else several[0]

    def make_error(self) -> FunctionError:
        """What is raised where such a gradient is differentiated."""
        return FunctionError(
            f"{self._owner} is differentiated twice, and keeps {self._found}, which its forward computes of its "
            "arguments and does not return.",
            repair="save arguments or outputs and compute it from them in backward, or return it as a further output.",
            reason="autograd records nothing within forward: the second derivative would lack what goes through it.",
        )


def _list_kept(ctx: Any) -> Iterator[tuple[str, Tensor]]:
    """What ``forward`` has saved, and what it has set as an attribute."""
    for place, each in enumerate(getattr(ctx, "to_save", None) or ()):
        if isinstance(each, Tensor):
            yield f"ctx.saved_tensors[{place}]", each
    for name, each in list(vars(ctx).items()):
        if isinstance(each, Tensor):
            yield f"ctx.{name}", each


class _Refused(torch.autograd.Function):
    """Hands gradients on; they cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, check: IntermediateCheck, *gradients: Tensor) -> tuple[Tensor, ...]:
        ctx.check = check
        return tuple(each.view_as(each) for each in gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ctx.check.make_error()
