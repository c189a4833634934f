"""Loss scaling: what the gradients of each backward pass were multiplied by."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

_MOST = 16
"""Losses that are remembered while nothing is recorded and so nothing is forgotten."""


class _Scaled:
    """A loss that was multiplied, and whether a pass has started from it."""

    __slots__ = ("loss", "scale", "used")

    def __init__(self, loss: torch.Tensor, scale: torch.Tensor) -> None:
        self.loss = weakref.ref(loss)
        self.scale = scale
        self.used = False


class LossScales:
    """Finds the scale of a pass by the losses that it starts from."""

    def __init__(self) -> None:
        self._scaled: list[_Scaled] = []

    def add(self, losses: Iterable[torch.Tensor], scale: torch.Tensor) -> None:
        """Note that losses have been multiplied by ``scale``."""
        self._scaled += [_Scaled(loss, scale) for loss in losses]
        del self._scaled[:-_MOST]

    def find(self, roots: Iterable[torch.Tensor]) -> torch.Tensor | None:
        """The scale of a pass that starts from these tensors; None where nothing was scaled.

        A pass from another tensor, while a scaled loss is still waiting for its pass, is taken to start from
        something computed of that loss (divided by the number of micro-batches, say).
        """
        if not self._scaled:
            return None
        ids = {id(root) for root in roots}
        found = next((item for item in self._scaled if id(item.loss()) in ids), None)
        if found is None:
            found = next((item for item in self._scaled if not item.used), None)
        if found is None:
            return None
        found.used = True
        return found.scale

    def forget(self) -> None:
        """The losses of a step are done with."""
        self._scaled.clear()
