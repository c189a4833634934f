"""The memory of a tensor: its bytes, and who else holds it."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

_BYTES = 512
_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def first_bytes(tensor: Tensor, most: int = _BYTES) -> bytes | Tensor:
    """Some of the first bytes of a tensor's elements, or where they are on a device, a copy of them there.

    Empty for one that does not lie in memory one element after the other.
    """
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return b""
    size = tensor.nbytes
    if not size or tensor.is_conj() or tensor.is_neg():
        return b""
    size = min(most, size)
    if tensor.is_cpu:
        return ctypes.string_at(tensor.data_ptr(), size)
    with torch.no_grad():
        return tensor.detach().view(-1)[: size // tensor.element_size()].view(torch.uint8).clone()


def count_same_rows(tensor: Tensor, rows: int = 4096, columns: int = 64) -> int:
    """How many rows of a matrix on the CPU are equal to another one of it, bit for bit.

    Of more rows or columns than that the first are looked at; where these are equal and there are more columns, all of
    those rows. None where they hold what is not finite: NaN is equal to nothing.
    """
    matrix = tensor.detach()[:rows].flatten(1)
    suspects = _group(matrix[:, :columns])
    if matrix.shape[1] > columns and suspects:
        suspects = _group(matrix[suspects]) if len(suspects) * matrix.shape[1] <= 1 << 22 else suspects
    if suspects and not bool(matrix[suspects].isfinite().all()):
        return 0
    return len(suspects)


def _group(matrix: Tensor) -> list[int]:
    """Numbers of the rows that are equal to another."""
    width = matrix.shape[1] * matrix.element_size()
    content = matrix.contiguous()
    data = ctypes.string_at(content.data_ptr(), len(matrix) * width)
    places: dict[bytes, list[int]] = {}
    for row in range(len(matrix)):
        places.setdefault(data[row * width : (row + 1) * width], []).append(row)
    return [row for same in places.values() if len(same) > 1 for row in same]


_OWN = 2
"""The tensor that is asked about, and the Python object of its storage."""


def is_held_elsewhere(values: Tensor) -> bool:
    """Whether anything but this tensor object keeps its memory alive."""
    storage = values.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > _OWN)
