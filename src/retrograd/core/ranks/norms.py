"""The norm of several tensors, and a factor for all of them, where some are spread over processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from retrograd.core.norms import join_norms, summing_type
from retrograd.core.ranks.placements import is_sharded, local_part


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """√Σ|x|² over all elements of all tensors, in float32 or better: a scalar on the device of the first.

    Of sharded tensors it is the norm over the elements of all processes, and the same number on each: one collective
    for all that are sharded in the same way.

    Args:
        tensors: at least one; on any devices, sparse ones among them.
    """
    device = tensors[0].device
    whole = [
        tensor.coalesce()._values() if tensor.is_sparse else tensor for tensor in tensors if not is_sharded(tensor)
    ]
    norms = [norm.to(device, torch.float64) for norm in _find_norms(whole)]
    sharded: dict[Any, list[Any]] = {}
    for tensor in tensors:
        if is_sharded(tensor):
            way = (tensor.device_mesh, tensor.placements, tensor.dtype)  # type: ignore[attr-defined]
            sharded.setdefault(way, []).append(tensor)
    for same in sharded.values():
        joined: Any = torch.linalg.vector_norm(torch.stack(_find_norms(same)), dtype=torch.float64)
        norms.append(joined.full_tensor().to(device))
    return join_norms(norms)


def scale_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all tensors by a scalar, in place; of sharded ones each process multiplies its part."""
    parts = [local_part(tensor) for tensor in tensors]
    for device in dict.fromkeys(part.device for part in parts):
        same = [part for part in parts if part.device == device]
        torch._foreach_mul_(same, factor.to(device, non_blocking=True))


def _find_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    norms: list[Tensor] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype is dtype]
        wide = summing_type(dtype)
        norms += torch._foreach_norm(same, 2.0, dtype=wide if wide is not dtype else None)
    return norms
