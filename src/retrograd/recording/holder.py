"""Kept tensors that wait until they are due, and how many bytes they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from retrograd.history.sink import KeptTensor, Moment
from retrograd.recording.keep import Keep
from retrograd.sites.site import Site


class Source(Protocol):
    """What a kept tensor is of."""

    @property
    def site(self) -> Site:
        """Its site."""

    @property
    def name(self) -> str:
        """That site, printed."""

    @property
    def keep(self) -> Keep | None:
        """Why it was kept."""


Kept = tuple[Source, torch.Tensor, int, int]
"""A tensor as it was just kept: where it is from, itself, its version, and its bytes."""


def count_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; of a sparse one, of what it stores."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    if tensor.layout is torch.sparse_coo:
        return count_bytes(tensor._values()) + count_bytes(tensor._indices())
    return tensor.values().nbytes


@dataclass(slots=True)
class Bundle:
    """What one policy kept of one micro-batch, as it came: most of it is let go again, so nothing is made of it yet.

    Attributes:
        moment: that micro-batch, at its last pass.
        scale: what its gradients were multiplied by.
        kept: the tensors.
        size: their bytes.
    """

    moment: Moment
    scale: float
    kept: list[Kept]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = sum(item[3] for item in self.kept)

    def unpack(self) -> Iterator[KeptTensor]:
        """The tensors as a sink takes them."""
        forward = replace(self.moment, backward=-1)
        for source, tensor, version, _ in self.kept:
            if source.site.quantity == "grad":
                yield KeptTensor(self.moment, source.name, tensor, version, self.scale)
            else:
                yield KeptTensor(forward, source.name, tensor, version)


class Holder:
    """Holds tensors of the last steps.

    Args:
        depth: how many steps before the newest one.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._held: deque[Bundle] = deque()

    @property
    def oldest(self) -> int | None:
        """The oldest step of which something is held."""
        return self._held[0].moment.step if self._held else None

    def add(self, bundle: Bundle) -> int:
        """Hold a bundle; returns the bytes of what has become too old for it."""
        self._held.append(bundle)
        freed = 0
        while self._held[0].moment.step < bundle.moment.step - self._depth:
            freed += self._held.popleft().size
        return freed

    def drop_oldest(self) -> Bundle:
        """Let the oldest micro-batch go."""
        return self._held.popleft()

    def release(self) -> list[Bundle]:
        """All that is held, oldest first; it is held no longer."""
        released = list(self._held)
        self._held.clear()
        return released
