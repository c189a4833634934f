"""Sums over tensors, that tell when a disk has changed a bit. Whoever changes one on purpose can sum it again."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor


def sum_tensor(tensor: Tensor) -> int:
    """Return a number that depends on every bit, on the shape and on the dtype of a dense tensor on the CPU."""
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    whole = tensor.detach().contiguous()
    data: Any = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy()  # a single element has any stride
    return zlib.crc32(data, zlib.crc32(head))


def check_sum(tensor: Tensor, told: object, name: str) -> None:
    """Check that a tensor is the one that was summed.

    Raises:
        ValueError: it is another.
    """
    if sum_tensor(tensor) != told:
        raise ValueError(f"{name!r} has a wrong checksum")
