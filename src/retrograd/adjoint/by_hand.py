"""An adjoint that the author of a layer has written, in place of the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from retrograd.errors import AdjointError

Adjoint = Callable[..., Any]
"""From one gradient for each output to one for each argument: Jᵀ u for u."""


def apply_adjoint(adjoint: Adjoint, cotangents: Sequence[Tensor], arguments: Sequence[Tensor]) -> list[Tensor]:
    """Jᵀ u for each argument; zeros where the adjoint gives None.

    Args:
        adjoint: what its author wrote.
        cotangents: u, which it is given as copies.
        arguments: what the results have the shapes of.

    Raises:
        AdjointError: what it returns does not fit.
    """
    with torch.no_grad():
        given = adjoint(*(cotangent.clone() for cotangent in cotangents))
    gradients = list(given) if isinstance(given, (tuple, list)) else [given]
    if len(gradients) != len(arguments):
        raise AdjointError(
            f"The adjoint returned {len(gradients)} gradients for {len(arguments)} arguments.",
            repair="return one for each argument that is a floating-point tensor, in order, and None for none.",
        )
    return [_fit(gradient, argument) for gradient, argument in zip(gradients, arguments, strict=True)]


def _fit(gradient: Any, argument: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros_like(argument)
    if not isinstance(gradient, Tensor) or gradient.shape != argument.shape:
        what = f"a tensor of shape {list(gradient.shape)}" if isinstance(gradient, Tensor) else repr(gradient)
        raise AdjointError(
            f"The adjoint returned {what} for an argument of shape {list(argument.shape)}.",
            repair="return a gradient of the shape of the argument.",
        )
    return gradient.detach().to_dense().to(argument.dtype)
