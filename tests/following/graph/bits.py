"""Comparing tensors to the last bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are of one kind and have the same bits, or are both missing."""
    if one is None or other is None:
        return one is other
    if one.is_nested and other.is_nested:
        return same(one.values(), other.values())
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    if one.layout == torch.sparse_coo:
        return same(one._indices(), other._indices()) and same(one._values(), other._values())
    return torch.equal(_bits(one), _bits(other))


def all_same(ones: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    """The same for two rows of tensors."""
    return len(ones) == len(others) and all(same(one, other) for one, other in zip(ones, others, strict=True))


def _bits(tensor: Tensor) -> Tensor:
    flat = torch.empty(
        tensor.numel(), dtype=tensor.dtype, device=tensor.device
    )  # strides of single elements mean nothing
    return flat.copy_(tensor.detach().reshape(-1)).view(torch.uint8)
