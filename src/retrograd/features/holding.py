"""What a feature is while the forward goes on, so that later layers may write where they like.

A value that was only referred to would change with every in-place layer behind it. What has been overwritten cannot
be copied any more, so the copy is made when the value is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from retrograd.hooks.nested import flatten, replace_tensors


def copy_detached(name: str, value: Any) -> Callable[[], Any]:
    """Copies without a graph, in a nest like the one that was seen."""
    copied = replace_tensors(value, (), {keys: tensor.detach().clone() for keys, tensor in flatten(value, ())})
    return lambda: copied


def hold_with_graph(name: str, value: Any) -> Callable[[], Any]:
    """The very tensors that were seen; in place of those overwritten by the end of the forward, copies made before.

    Later features depend on the tensor that was seen, and not on a copy of it, so the copy is the second choice.
    """
    copies = {keys: _Backup(tensor) for keys, tensor in flatten(value, ())}
    return lambda: replace_tensors(value, (), {keys: copy.settle() for keys, copy in copies.items()})


class _Backup:
    """A tensor of a graph, and a copy that is part of the graph too."""

    __slots__ = ("_copy", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = None if tensor.is_inference() else tensor._version
        self._copy = tensor.clone()

    def settle(self) -> Tensor:
        """The tensor, if it is what it was."""
        unchanged = self._version is not None and self._tensor._version == self._version
        return self._tensor if unchanged else self._copy
