"""What the derivative of a module call is taken with respect to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from retrograd.adjoint.vectors import draw_like
from retrograd.hooks.nested import Keys


@dataclass(frozen=True, slots=True, eq=False)
class Variable:
    """A tensor that the derivative is taken with respect to.

    Attributes:
        keys: its places: arguments with the way into them, or the path and name of a parameter within the module.
        tensor: where the derivative is taken.
        is_parameter: it belongs to the module.
        wants_gradient: in the model it requires grad.
        padding: the row of it that is given no gradient on purpose: an embedding's ``padding_idx``.
    """

    keys: tuple[Keys, ...]
    tensor: Tensor
    is_parameter: bool
    wants_gradient: bool
    padding: int | None = None

    def draw_tangent(self, generator: torch.Generator) -> Tensor:
        """Gaussian numbers, zeros where no gradient is meant to arrive."""
        tangent = draw_like(self.tensor, generator)
        if self.padding is not None:
            tangent[self.padding] = 0
        return tangent
