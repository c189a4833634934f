"""The elements of a strided tensor as flat pieces of bounded size, in storage order, without copying dense memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def drop_repeats(tensor: Tensor) -> tuple[Tensor, int]:
    """A tensor without the dimensions it was expanded along, and how often each element that is left appears.

    Dimensions of size 1 go too, and the others are sorted from the largest stride to the smallest.
    """
    repeats = 1
    for dim in reversed(range(tensor.ndim)):
        if tensor.size(dim) == 1 or (tensor.stride(dim) == 0 and tensor.size(dim) > 0):
            repeats *= tensor.size(dim)
            tensor = tensor.select(dim, 0)
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(order), repeats


def split_flat(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """Flat tensors of at most ``size`` elements that together are all elements of a tensor."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        yield from torch.split(tensor.view(-1), size)
        return
    rows = max(1, size * tensor.size(0) // tensor.numel())
    for part in torch.split(tensor, rows):
        yield from torch.split(part.reshape(-1), size)
