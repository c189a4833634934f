"""What belongs to a gradient: the value that it is of, and what went into that very call of the module."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from retrograd.errors import CannotRewriteError

NOTHING: Mapping[str, Tensor] = {}


class Noted:
    """A tensor as it was when it was seen; it shares the memory, and not the graph."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()  # the tensor itself holds its node, and the node the hook that holds this
        self._version = -1 if tensor.is_inference() else tensor._version

    def read(self, what: str, site: str) -> Tensor:
        """The tensor.

        Raises:
            CannotRewriteError: it has been overwritten since.
        """
        if self._version >= 0 and self._tensor._version != self._version:
            raise CannotRewriteError(
                f"A rule at {site} asks for {what}, and that has been overwritten in place.",
                repair="make the layer that writes into it work out of place (inplace=False).",
                reason="the rule would see what that layer has made of it.",
            )
        return self._tensor


class Beside:
    """What rules are shown beside a gradient.

    Args:
        value: the activation, or parameter, that it is the gradient of; None where no rule asks.
        inputs: what the module was called with, by argument.
    """

    __slots__ = ("_inputs", "_value")

    def __init__(self, value: Noted | None, inputs: Mapping[str, Noted]) -> None:
        self._value = value
        self._inputs = inputs

    def read_value(self, site: str) -> Tensor | None:
        """The value, as it was."""
        return None if self._value is None else self._value.read("the activation", site)

    def read_inputs(self, site: str) -> Mapping[str, Tensor]:
        """The inputs, as they were when the module was called."""
        return {name: noted.read(f"the input {name!r}", site) for name, noted in self._inputs.items()}
