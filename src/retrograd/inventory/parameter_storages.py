"""Memory that is there anyway: parameters and buffers. What is saved of them costs nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from retrograd.hooks.module_paths import walk_buffers, walk_parameters
from retrograd.hooks.saved_reading import key_of, storages_of


class Permanent(NamedTuple):
    """A parameter or buffer, or memory that several of them share."""

    kind: str
    name: str
    layout: tuple[torch.Size, tuple[int, ...], int] | None


class PermanentMemory:
    """Knows the memory of all parameters and buffers of some models, as it is now."""

    def __init__(self, models: Iterable[tuple[str, nn.Module]]) -> None:
        self._known: dict[int, Permanent] = {}
        named = list(models)
        for name, parameter in walk_parameters(named):
            self._add("parameter", name, parameter)
        for name, buffer in walk_buffers(named):
            self._add("buffer", name, buffer)

    def add_leaf(self, leaf: Tensor) -> None:
        """A tensor that gets a gradient, and is no input of a model: it is trained."""
        self._add("parameter", "", leaf)

    def find(self, key: int) -> Permanent | None:
        """What lies in the memory with this identity."""
        return self._known.get(key)

    def describe(self, key: int, tensor: Tensor) -> tuple[str, str] | None:
        """Kind and name of a tensor that lies there: ``parameter view`` if it is not the parameter as it is."""
        found = self._known.get(key)
        if found is None:
            return None
        is_whole = found.layout == _layout_of(tensor)
        return found.kind if is_whole else f"{found.kind} view", found.name

    def _add(self, kind: str, name: str, tensor: Tensor) -> None:
        if is_lazy(tensor):
            return
        for storage, _ in storages_of(tensor):
            self._known.setdefault(key_of(storage), Permanent(kind, name, _layout_of(tensor)))


def _layout_of(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], int] | None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())
