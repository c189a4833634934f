"""A node of our own, through which one use of a tensor gets its gradient. For rewriting alone, never for reading.

A tensor has one gradient, the sum over all its uses. Where one use is to be changed and the others left alone, that
use is given another tensor over the same memory, with a node between.
"""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

from retrograd.hooks.engine import next_sequence_number

_origins = WeakIdKeyDictionary()


def branch(tensor: Tensor) -> Tensor:
    """A tensor that has the same elements in the same memory, and a gradient of its own.

    Args:
        tensor: one that requires grad, while grad is enabled.
    """
    edge, number = get_gradient_edge(tensor), next_sequence_number()
    branched = tensor.view_as(tensor)
    _origins[branched] = (edge, number)
    return branched


class VersionCount:
    """Tells whether anybody has written into a tensor's memory since, without holding that memory.

    Args:
        tensor: the tensor; all views of one memory have one count.
    """

    __slots__ = ("_token", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._token = tensor.detach()
        self._token.data = tensor.new_empty(0)  # the count stays
        self._version = tensor._version

    @property
    def has_grown(self) -> bool:
        """Whether there was a write."""
        return self._token._version != self._version


def origin_of(tensor: Tensor) -> tuple[GradientEdge, int] | None:
    """For a tensor that was branched off: the edge of what it came from, and the number of the node between."""
    found: tuple[GradientEdge, int] | None = _origins.get(tensor) if len(_origins) else None
    return found
