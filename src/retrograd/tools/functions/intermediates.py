"""What a Function saves that is neither an argument nor an output: to a second derivative it is a constant.

Autograd records nothing within ``forward``, so the derivative of what is computed there and saved is lost where the
backward is differentiated. Whether a class does so is found at its first call with gradients; from then on a call of
one that does not costs what it did, and a call of one that does has a mark, which leads to its arguments and from which
its gradients hang. Nothing is raised before such a gradient is differentiated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from retrograd.core.errors import FunctionError
from retrograd.core.hooks.derived import DerivedTensors
from retrograd.core.hooks.engine import grad_enabled, is_compiling, uncompiled
from retrograd.core.hooks.functions import transforms_active
from retrograd.core.hooks.nested import flatten

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
            is_fine = self._is_known and not self._found
            if is_fine or is_compiling() or transforms_active is None or transforms_active():
                return method(function, ctx, *args, **kwargs)
            given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            sources = [each for each in given if each.requires_grad]
            if not sources:
                return method(function, ctx, *args, **kwargs)
            if self._is_known:
                output = method(function, ctx, *args, **kwargs)
            else:
                output = self._watch(functools.partial(method, function, ctx, *args, **kwargs), ctx, given, sources)
                self._settle(method)
            if self._found:
                with torch.enable_grad():
                    ctx.retrograd_mark = _Mark.apply(self, *sources)  # type: ignore[no-untyped-call]
            return output

        return forward

    def _watch(self, run: Callable[[], Any], ctx: Any, given: list[Tensor], sources: list[Tensor]) -> Any:
        """Run ``forward``, and find what it saves that it has computed of the sources and does not return."""
        with DerivedTensors(sources) as derived:
            output = run()
        outputs = output if isinstance(output, tuple) else (output,)
        known = set(map(id, (*given, *outputs)))
        kept = _list_kept(ctx)
        self._found = next((name for name, each in kept if id(each) not in known and derived.holds(each)), "")
        return output

    def guard(self, method: Method) -> Method:
        """The user's ``backward``, whose gradients cannot be differentiated where that would lose a part."""

        @functools.wraps(method)
        @uncompiled
        def backward(function: Any, ctx: Any, *gradients: Any) -> Any:
            returned = method(function, ctx, *gradients)
            mark = getattr(ctx, "retrograd_mark", None)
            return _hang_on(mark, returned) if mark is not None and grad_enabled() else returned

        return backward

    def _settle(self, method: Method) -> None:
        self._is_known = True
        if self.forward_code is not None and not self._found:
            self.forward_code.__globals__["method"] = method
        if self._found and self.backward_code is not None:
            of_code = self.backward_code.__globals__
            of_code["method"] = self.guard(of_code["method"])

    def make_error(self) -> FunctionError:
        """What is raised where such a gradient is differentiated."""
        return FunctionError(
            f"{self._owner} is differentiated twice, and keeps {self._found}, which its forward computes of its "
            "arguments and does not return.",
            repair="save arguments or outputs and compute it from them in backward, or return it as a further output.",
            reason="autograd records nothing within forward: the second derivative would lack what goes through it.",
        )


def _list_kept(ctx: Any) -> Iterator[tuple[str, Tensor]]:
    """What ``forward`` has saved, and what it has set as an attribute, or put into a list or dictionary there."""
    for place, each in enumerate(getattr(ctx, "to_save", None) or ()):
        if isinstance(each, Tensor):
            yield f"ctx.saved_tensors[{place}]", each
    for name, value in list(vars(ctx).items()):
        if not name.startswith("retrograd_"):
            for (_, *keys), each in flatten(value, (name,)):
                yield f"ctx.{name}{''.join(f'[{key}]' for key in keys)}", each


def _hang_on(mark: Tensor, returned: Any) -> Any:
    """The same gradients, from which the mark is reached too."""
    values = list(returned.values()) if isinstance(returned, dict) else returned
    several = list(values) if isinstance(values, list | tuple) else [values]
    places = [place for place, each in enumerate(several) if isinstance(each, Tensor)]
    if not places:
        return returned
    hung = _Hung.apply(mark, *map(several.__getitem__, places))  # type: ignore[no-untyped-call]
    for place, each in zip(places, hung, strict=True):
        several[place] = each
    if isinstance(returned, dict):
        return dict(zip(returned, several, strict=True))
    return tuple(several) if isinstance(returned, list | tuple) else several[0]


class _Mark(torch.autograd.Function):
    """An empty tensor of a call, which leads to its arguments: the engine comes by where it goes on to one of them."""

    @staticmethod
    def forward(ctx: Any, check: IntermediateCheck, *sources: Tensor) -> Tensor:
        ctx.check = check
        return torch.empty(0, device=sources[0].device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise ctx.check.make_error()


class _Hung(torch.autograd.Function):
    """Hands gradients on."""

    @staticmethod
    def forward(ctx: Any, mark: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.view_as(each) for each in gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *gradients
