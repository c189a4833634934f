"""Which memory belongs to parameters and buffers: it is there anyway, whatever autograd saves of it."""

from __future__ import annotations

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
