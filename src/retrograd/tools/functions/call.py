"""A call of a Function: what its static methods have to know, from the forward to the last backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from retrograd.core.errors import FunctionError


class Auxiliary:
    """An output of a Function's ``forward`` that carries data and no gradient.

        return values, rg.Auxiliary(indices)

    The caller gets ``indices`` itself. A tensor never requires grad, whatever its dtype, and ``backward`` has no
    argument for it; ``jvp`` returns no tangent for it.

    Args:
        value: anything.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Auxiliary({self.value!r})"


NO_GRADIENT = (None,)
"""That of the call itself, which ``apply`` is given last."""

Shape = torch.Size | None
"""Of an argument; None where no gradient belongs to it."""


class FunctionCall:
    """A call of one instance. It holds no tensor, and only the node of the call holds it.

    Args:
        function: the instance.
        names: one for each value that torch's ``apply`` is given.
        shapes: of the same values.
        positions: how many of them ``forward`` takes by position. It takes the others by name.

    Attributes:
        hidden: for each output, whether it is auxiliary; empty when none is.
    """

    __slots__ = ("function", "hidden", "names", "positions", "shapes")

    def __init__(self, function: Any, names: tuple[str, ...], shapes: list[Shape], positions: int) -> None:
        self.function = function
        self.names = names
        self.shapes = shapes
        self.positions = positions
        self.hidden: tuple[bool, ...] = ()

    @property
    def owner(self) -> str:
        return type(self.function).__name__

    def split(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of ``forward``."""
        if self.positions == len(values):
            return values, {}
        return values[: self.positions], dict(zip(self.names[self.positions :], values[self.positions :], strict=True))

    def uncover(self, output: Any) -> Any:
        """Take the marks of what is auxiliary off what ``forward`` returned, and note them.

        Raises:
            FunctionError: autograd would not see the tensors in it.
        """
        if isinstance(output, Tensor):
            return output
        outputs = output if isinstance(output, tuple) else (output,)
        hidden = tuple([isinstance(each, Auxiliary) for each in outputs])
        for each in outputs:
            if isinstance(each, list | dict) and _has_tensor(each):
                raise FunctionError(
                    f"forward of {self.owner} returned a {type(each).__name__} with tensors.",
                    repair="return a tensor or a tuple of tensors; what has no gradient goes into rg.Auxiliary(...).",
                    reason="autograd does not look into containers, and these tensors would come out without a graph.",
                )
        self.hidden = hidden if True in hidden else ()
        if not self.hidden:
            return output
        plain = tuple([each.value if isinstance(each, Auxiliary) else each for each in outputs])
        return plain if isinstance(output, tuple) else plain[0]

    def mark_auxiliary(self, ctx: Any, output: Any) -> None:
        """Have autograd never ask for gradients of outputs that are auxiliary."""
        outputs = output if isinstance(output, tuple) else (output,)
        found = [each for each, hidden in zip(outputs, self.hidden, strict=True) if hidden and isinstance(each, Tensor)]
        ctx.mark_non_differentiable(*(ctx.non_differentiable or ()), *found)

    def note(self, error: Exception, method: str) -> None:
        """Add to an error in which method it was raised."""
        error.add_note(f"in {method} of the Function {self.owner}")

    def of_outputs(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Pick, of one thing for each output, those of the outputs that have a gradient."""
        if not self.hidden:
            return given
        return tuple([each for each, hidden in zip(given, self.hidden, strict=True) if not hidden])

    def for_outputs(self, returned: Any) -> Any:
        """Arrange what ``jvp`` returned for the outputs that have a tangent, one for each output: None for others.

        Raises:
            FunctionError: there are too few or too many.
        """
        if not self.hidden:
            return returned
        tangents = returned if isinstance(returned, tuple) else (returned,)
        if len(tangents) != self.hidden.count(False):
            raise FunctionError(
                f"jvp of {self.owner} returned {len(tangents)} tangents; expected {self.hidden.count(False)}, one for "
                "each output that is not auxiliary.",
                repair="return None in the place of those that have none.",
            )
        left = iter(tangents)
        return tuple([None if hidden else next(left) for hidden in self.hidden])

    def of_inputs(self, tangents: tuple[Any, ...]) -> tuple[Any, ...]:
        """Tangents of the arguments; None for those that have no gradient."""
        return tuple([None if shape is None else each for each, shape in zip(tangents, self.shapes, strict=True)])

    def arrange_gradients(self, returned: Any) -> tuple[Tensor | None, ...]:
        """Arrange what ``backward`` returned, as one gradient for each value that ``apply`` was given.

        Raises:
            FunctionError: there are too few or too many, one has a name that is none of the arguments, is no
                gradient of its argument, or has another shape.
        """
        if isinstance(returned, dict):
            names = self.names
            gradients = tuple(map(returned.get, names))
            for name in returned:
                if name not in names:
                    self._refuse_name(name)
        else:
            gradients = returned if isinstance(returned, tuple) else (returned,)
            if len(gradients) != len(self.names):
                gradients = self._without_extra(gradients)
        for name, gradient, shape in zip(self.names, gradients, self.shapes):  # noqa: B905  # of as many, as seen above
            if gradient is not None and (not isinstance(gradient, Tensor) or gradient.shape != shape):
                self._check_gradient(name, gradient, shape)
        return gradients

    def _refuse_name(self, name: Any) -> None:
        raise FunctionError(
            f"backward of {self.owner} returned a gradient for {name!r}, which forward does not take.",
            repair=f"its arguments are {', '.join(self.names)}; those that are left out have no gradient.",
        )

    def _without_extra(self, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        """Further gradients are let pass when they are None, as torch does."""
        count = len(self.names)
        if len(gradients) < count or any(extra is not None for extra in gradients[count:]):
            raise FunctionError(
                f"backward of {self.owner} returned {len(gradients)} gradients; expected {count}, one for each of "
                f"{', '.join(self.names)}.",
                repair="put None in the place of those that have none, or return a dict with gradients by name.",
            )
        return gradients[:count]

    def _check_gradient(self, name: str, gradient: Any, shape: Shape) -> None:
        if shape is None:
            raise FunctionError(
                f"backward of {self.owner} returned a gradient for {name!r}, which is not a tensor or is auxiliary.",
                repair="return None for it, or leave its name out.",
            )
        if not isinstance(gradient, Tensor):
            raise FunctionError(
                f"backward of {self.owner} returned {gradient!r} as the gradient of {name!r}; expected a tensor of "
                f"shape {list(shape)}, or None.",
                repair="return a tensor.",
            )
        if not _sums_to(gradient.shape, shape):
            raise FunctionError(
                f"backward of {self.owner} returned a gradient of shape {list(gradient.shape)} for {name!r}; expected "
                f"{list(shape)}.",
                repair="return a gradient of the shape of the argument, or one that sums to it over dimensions that "
                "were broadcast.",
            )


def _sums_to(given: torch.Size, shape: torch.Size) -> bool:
    """Return whether torch can sum a gradient to this shape: the inverse of broadcasting."""
    if len(given) < len(shape):
        return False
    return all(size in (1, of_gradient) for size, of_gradient in zip(reversed(shape), reversed(given), strict=False))


def _has_tensor(container: Any) -> bool:
    if isinstance(container, list | tuple | dict):
        return any(map(_has_tensor, container.values() if isinstance(container, dict) else container))
    return isinstance(container, Tensor)
