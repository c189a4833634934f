"""One operation on many tensors, in as few kernels as torch can."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """√Σ|x|² over all elements of all tensors, in float32 or better: a scalar on the device of the first.

    Args:
        tensors: at least one; on any devices, sparse ones among them.
    """
    dense = [tensor.coalesce()._values() if tensor.is_sparse else tensor for tensor in tensors]
    norms: list[Tensor] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in dense):
        same = [tensor for tensor in dense if tensor.dtype is dtype]
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        norms += torch._foreach_norm(same, 2.0, dtype=wide)
    device = dense[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device, torch.float64) for norm in norms]))
    return total


def scale_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all tensors by a scalar, in place."""
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.device == device]
        torch._foreach_mul_(same, factor.to(device, non_blocking=True))
