"""Variables that the derivative of a module call is taken with respect to, and the names of its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retrograd.core.hooks.names import ArgumentNames
from retrograd.core.hooks.nested import Keys, flatten
from retrograd.tools.adjoint.numerics import draw_like


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


# ---- arguments ----


def name_arguments(
    names: ArgumentNames, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Keys, ...], Tensor]]:
    """Each tensor once, with the keys of all places where it is given: a query may be the key and the value too."""
    places: dict[int, list[Keys]] = {}
    tensors: dict[int, Tensor] = {}
    for keys, tensor in flatten(names.bind(args, kwargs), ("input",)):
        places.setdefault(id(tensor), []).append(keys)
        tensors[id(tensor)] = tensor
    for identity, tensor in tensors.items():
        yield tuple(places[identity]), tensor


def is_differentiable(tensor: Tensor) -> bool:
    """Return whether derivatives with respect to a tensor mean something, and can be taken element by element."""
    return (
        (tensor.is_floating_point() or tensor.is_complex())
        and tensor.numel() > 0
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_meta
    )
