"""The arguments of a Function's ``forward``, and how one call fills them: torch's ``apply`` knows positions only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from itertools import starmap
from typing import Any

from torch import Tensor

from retrograd.core.errors import FunctionError
from retrograd.tools.functions.call import Shape

_MISSING: Any = inspect.Parameter.empty
_CONTAINERS = (list, tuple, dict)
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

Bound = tuple[tuple[Any, ...], tuple[str, ...], int]
"""The values of one call, their names, and how many ``forward`` takes by position; it takes the others by name.

Those of ``*tensors`` are called ``tensors[0]``, ``tensors[1]`` and so on."""


class Arguments:
    """The arguments of one ``forward``, without ``self`` and ``ctx``.

    Args:
        owner: name of the Function.
        forward: its method.
        has_ctx: whether its first argument is ``ctx``.
        auxiliary: names of arguments that carry data and no gradient.

    Attributes:
        signature: as ``inspect`` gives it.
        names: those of all arguments, in order.
        are_plain: whether all may be given by position and none is auxiliary, so that they are as many in each call.

    Raises:
        FunctionError: there is no ``ctx``, or an auxiliary argument that ``forward`` does not take.
    """

    def __init__(self, owner: str, forward: Callable[..., Any], *, has_ctx: bool, auxiliary: Sequence[str]) -> None:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        if has_ctx and (not parameters or parameters[0].name.lstrip("_") not in ("ctx", "context")):
            raise FunctionError(
                f"forward of {owner} takes no ctx.",
                repair="write `def forward(self, ctx, ...)`; or `setup_context(self, ctx, inputs, output)` beside it.",
            )
        parameters = parameters[1:] if has_ctx else parameters
        self.signature = inspect.Signature(parameters)
        self.names = tuple(parameter.name for parameter in parameters)
        self._owner = owner
        self._auxiliary = frozenset((auxiliary,) if isinstance(auxiliary, str) else auxiliary)
        self._positional = [parameter.name for parameter in parameters if parameter.kind in _BY_POSITION]
        self._rest = next(
            (parameter.name for parameter in parameters if parameter.kind is parameter.VAR_POSITIONAL), ""
        )
        self._defaults = [(parameter.name, parameter.default) for parameter in parameters]
        self._are_fixed = all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
        self.are_plain = self._are_fixed and not self._auxiliary
        if unknown := self._auxiliary - set(self.names):
            raise FunctionError(
                f"{owner} declares {', '.join(map(repr, sorted(unknown)))} auxiliary, which forward does not take.",
                repair=f"name some of its arguments: {', '.join(self.names)}.",
            )

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any], holder: object, held: Collection[str]) -> Bound:
        """Every argument of one call. What the caller leaves out is an attribute of the holder, else the default.

        Args:
            args: as given by the caller.
            kwargs: as given by the caller.
            holder: has tensors that stand in for arguments.
            held: names of these.

        Raises:
            TypeError: the call does not fit, as for any Python function.
        """
        names, positions = self.names, len(self.names)
        if not self._are_fixed:
            values, names, positions = self._fill_any(args, kwargs, holder, held)
        elif len(args) == positions and not kwargs:
            values = args
        else:
            values = self._fill(args, kwargs, holder, held)
        if self._auxiliary:
            values = tuple(starmap(self._without_gradient, zip(names, values, strict=True)))
        return values, names, positions

    def shapes_of(self, names: tuple[str, ...], values: tuple[Any, ...]) -> list[Shape]:
        """The shapes that gradients of these arguments are to have; None where there is none.

        Raises:
            FunctionError: a tensor that requires grad hides in a container.
        """
        shapes: list[Shape] = []
        for value in values:
            if isinstance(value, Tensor):
                shapes.append(value.shape)
                continue
            if value is not None:
                self.check_other(names[len(shapes)], value)
            shapes.append(None)
        if not self._auxiliary:
            return shapes
        return [None if self._is_auxiliary(name) else shape for name, shape in zip(names, shapes, strict=True)]

    def _is_auxiliary(self, name: str) -> bool:
        """Return whether the argument, or the ``*arguments`` that it is one of, was declared to carry no gradient."""
        return name.partition("[")[0] in self._auxiliary

    def _fill(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], holder: object, held: Collection[str]
    ) -> tuple[Any, ...]:
        """All values by position, several times quicker than ``inspect`` finds them."""
        values, taken = list(args), 0
        for name, default in self._defaults[len(args) :]:
            if name in kwargs:
                value = kwargs[name]
                taken += 1
            else:
                value = _stand_in(holder, name, default) if name in held else default
            values.append(value)
        if taken != len(kwargs) or len(values) != len(self.names) or any(value is _MISSING for value in values):
            return self._fill_any(args, kwargs, holder, held)[0]  # which knows what to say
        return tuple(values)

    def _fill_any(self, args: tuple[Any, ...], kwargs: dict[str, Any], holder: object, held: Collection[str]) -> Bound:
        given = {*self._positional[: len(args)], *kwargs}
        stand_ins = {name: _stand_in(holder, name, _MISSING) for name in held if name not in given}
        found = {name: value for name, value in stand_ins.items() if value is not _MISSING}
        try:
            bound = self.signature.bind(*args, **found, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._owner}: {error}") from None
        bound.apply_defaults()
        positions = len(bound.args)
        rest = (f"{self._rest}[{index}]" for index in range(positions - len(self._positional)))
        if doubled := bound.kwargs.keys() & set(self._positional):  # Python lets a positional-only name occur again
            raise TypeError(f"{self._owner}: multiple values for argument {min(doubled)!r}")
        return (*bound.args, *bound.kwargs.values()), (*self._positional, *rest, *bound.kwargs), positions

    def _without_gradient(self, name: str, value: Any) -> Any:
        return (
            value.detach() if isinstance(value, Tensor) and value.requires_grad and self._is_auxiliary(name) else value
        )

    def check_other(self, name: str, value: Any) -> None:
        """Refuse what is not a tensor, where that loses gradients.

        Raises:
            FunctionError: a tensor that requires grad hides in a container.
        """
        if _hides_gradient(value) and not self._is_auxiliary(name):
            raise FunctionError(
                f"The argument {name!r} of {self._owner} is a {type(value).__name__} with tensors that require grad.",
                repair=f"take them one by one, as in `*{name}`, or declare `auxiliary = ({name!r},)` when they have no "
                "gradient.",
                reason="autograd does not look into containers, and their gradients would be lost without a word.",
            )


def _stand_in(holder: object, name: str, default: Any) -> Any:
    value = getattr(holder, name, None)
    return value if isinstance(value, Tensor) else default


def _hides_gradient(value: Any) -> bool:
    if isinstance(value, _CONTAINERS):
        return any(map(_hides_gradient, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor) and value.requires_grad
