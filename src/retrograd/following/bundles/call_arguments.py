"""The arguments of one call of an operation, by the names in torch's schema, and what can be required of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor


def require(condition: object, what: str) -> None:
    """Raise a ``ValueError`` where a condition is not met."""
    if not condition:
        raise ValueError(what)


class CallArguments(dict[str, Any]):
    """Arguments by their names. What is expected of one and not met is a ``ValueError``."""

    @classmethod
    def bind(cls, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Self:
        """Name the arguments of a call, with defaults for those that are not given.

        Raises:
            ValueError: there are too many, or too few.
        """
        declared = operation._schema.arguments
        require(len(args) <= len(declared), f"{len(args)} arguments are too many")
        given = {each.name: each.default_value for each in declared if each.has_default_value()}
        given |= dict(zip((each.name for each in declared), args, strict=False)) | dict(kwargs)
        if missing := [each.name for each in declared if each.name not in given]:
            raise ValueError(f"the argument {missing[0]!r} is missing")
        return cls(given)

    def tensors(self) -> Iterator[Tensor]:
        """The tensors among the arguments, and in lists of them."""
        return _tensors_in(self.values())

    def expect_shape(self, name: str, shape: Sequence[int]) -> None:
        """Expect an argument of this shape."""
        found = tuple(self[name].shape)
        require(found == tuple(shape), f"{name} has the shape {found}, not {tuple(shape)}")

    def expect_same_shapes(self, *names: str) -> None:
        """Expect several arguments of one shape."""
        for name in names[1:]:
            self.expect_shape(name, self[names[0]].shape)

    def expect_length(self, name: str, length: int, *, needed: bool = True, used: bool = True) -> None:
        """Expect that many elements; where it is not needed it may be None, and where it is not used, empty."""
        tensor = self[name]
        if tensor is None:
            require(not needed, f"{name} is missing")
            return
        is_right = tensor.numel() == length or not (used or tensor.numel())
        require(is_right, f"{name} has {tensor.numel()} elements, not {length}")

    def expect_indices(self, name: str, end: int, *also: int) -> None:
        """Expect indices from 0 to before the end, or one of a few other numbers."""
        indices = self[name]
        if not indices.numel():
            return
        require(indices.dtype in {torch.int64, torch.int32}, f"{name} is of {indices.dtype}")
        is_right = (indices >= 0) & (indices < end)
        for number in also:
            is_right |= indices == number
        require(is_right.all(), f"an index in {name} is outside of 0 to {end - 1}")


Check = Callable[[CallArguments], None]
"""Raises a ``ValueError`` for arguments that a forward cannot have given."""


def _tensors_in(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)
