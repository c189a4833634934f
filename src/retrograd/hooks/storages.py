"""The memory of tensors: its bytes, who else holds it, and whether it belongs to parameters and buffers."""

from __future__ import annotations

import ctypes
import weakref
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from retrograd.hooks.saved import base_of, is_cast_of_parameter
from retrograd.hooks.saved_reading import storages_of

_LOW = frozenset({torch.bfloat16, torch.float16})

Layout = tuple[torch.Size, tuple[int, ...], int]


class ParameterStorage(NamedTuple):
    """The memory of a parameter or buffer, or of several that share it.

    Attributes:
        storage: the memory, which is not held.
        kind: ``parameter`` or ``buffer``.
        name: as in ``"blocks.3.fc:weight"``; empty where no model names it.
        layout: size, strides and offset of the first of them; None where there is no such thing.
    """

    storage: weakref.ref[torch.UntypedStorage]
    kind: str
    name: str
    layout: Layout | None


class ParameterStorages:
    """The storages of parameters and buffers. A Linear saves ``weight.t()``, a plain tensor: its storage tells it."""

    def __init__(self) -> None:
        self._known: dict[int, ParameterStorage] = {}
        self._shapes: set[torch.Size] = set()

    def learn(self, module: nn.Module) -> None:
        """Note the parameters and buffers of one module, those of its children left out."""
        replicated = vars(module).get("_former_parameters", {})  # of nn.DataParallel's replicas
        for tensor in (*module._parameters.values(), *replicated.values()):
            self.add("parameter", "", tensor)
        for tensor in module._buffers.values():
            self.add("buffer", "", tensor)

    def add(self, kind: str, name: str, tensor: Tensor | None) -> None:
        """Note one parameter or buffer. Memory that is known keeps its name."""
        if tensor is None or is_lazy(tensor):
            return
        layout = _layout_of(tensor)
        if layout is not None:
            self._shapes |= {tensor.shape, tensor.shape[::-1]}
        for storage, _ in storages_of(tensor):
            key = id(storage)
            if self.find(storage) is None:
                reference = weakref.ref(storage, partial(_forget, weakref.ref(self), key))
                self._known[key] = ParameterStorage(reference, kind, name, layout)

    def find(self, storage: torch.UntypedStorage) -> ParameterStorage | None:
        """What lies in this memory; None where that is not a parameter or buffer."""
        known = self._known.get(id(storage))
        return known if known is not None and known.storage() is storage else None

    def describe(self, storage: torch.UntypedStorage, tensor: Tensor) -> tuple[str, str] | None:
        """Kind and name of a tensor that lies there: ``parameter view`` if it is not the parameter as it is."""
        found = self.find(storage)
        if found is None:
            return None
        return found.kind if found.layout == _layout_of(tensor) else f"{found.kind} view", found.name

    def include(self, tensor: Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether a tensor lies in memory that stays: of a parameter or buffer, or of a cast that autocast holds."""
        if self.find(storage) is not None or type(tensor) is nn.Parameter or isinstance(base_of(tensor), nn.Parameter):
            return True
        return (
            tensor.dtype in _LOW
            and tensor.requires_grad
            and tensor.shape in self._shapes
            and is_cast_of_parameter(tensor)
        )


def _layout_of(tensor: Tensor) -> Layout | None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


def _forget(storages: weakref.ref[ParameterStorages], key: int, gone: weakref.ref[torch.UntypedStorage]) -> None:
    held = storages()
    known = None if held is None else held._known.get(key)
    if held is not None and known is not None and known.storage is gone:
        del held._known[key]


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
