"""The numbers in a gradient, looked at where somebody asks: each look waits for the tensor's device."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from retrograd.graph.node import TensorInfo
from retrograd.graph.walker import describe
from retrograd.hooks.engine import is_transformed
from retrograd.norms import norm


def holds_nonfinite(gradients: Iterable[Tensor | None]) -> bool:
    """Whether any of these holds NaN or infinity; False where that cannot be told."""
    return any(gradient is not None and not _is_finite(gradient) for gradient in gradients)


def count_nonfinite(tensor: Tensor) -> int | None:
    """How many elements are NaN or infinite; None where that cannot be told."""
    with torch.no_grad():
        try:
            values = readable_values(tensor)
            return None if values is None else int(values.numel() - values.isfinite().sum().item())
        except (RuntimeError, NotImplementedError):  # nested, quantized, or out of memory
            return None


def examine(gradient: Tensor | None) -> tuple[TensorInfo, int | None] | None:
    """Describe a gradient, and count its elements that are not finite; None for None."""
    info = describe(gradient)
    return None if gradient is None or info is None else (info, count_nonfinite(gradient))


def norm_of(gradients: Iterable[Tensor | None]) -> float | None:
    """The Euclidean norm of all of them together; None if none of them can be read."""
    norms: list[float] = []
    with torch.no_grad():
        for gradient in gradients:
            values = readable_values(gradient)
            if values is not None:
                norms.append(float(norm(values)))
    return math.hypot(*norms) if norms else None


def readable_values(tensor: Tensor | None) -> Tensor | None:
    """The numbers in a tensor, without its graph; None where it has none that can be read."""
    if tensor is None or is_transformed(tensor) or tensor.is_meta:
        return None
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    values = tensor.detach()
    if values.is_sparse:
        return values.coalesce().values()
    if values.layout is not torch.strided:
        return values.values()
    return values


def _is_finite(gradient: Tensor) -> bool:
    values = readable_values(gradient)
    if values is None or not values.numel():
        return True
    with torch.no_grad():
        if not values.is_complex() and math.isfinite(values.sum().item()):  # twenty times as fast as to ask them all
            return True
        return bool(values.isfinite().all())
