"""What stays in memory whatever a policy says: it is held by the program anyway."""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch import Tensor, nn

from retrograd.hooks.saved import base_of, is_cast_of_parameter

_LOW = frozenset({torch.bfloat16, torch.float16})


class Residents:
    """The storages of parameters and buffers, and casts of parameters that autocast holds.

    A Linear saves ``weight.t()``, a plain tensor; it is told by its storage.
    """

    def __init__(self) -> None:
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._shapes: set[torch.Size] = set()

    def learn(self, module: nn.Module) -> None:
        """Note the parameters and buffers of one module, those of its children left out."""
        held = [*module._parameters.values(), *module._buffers.values()]
        held += vars(module).get("_former_parameters", {}).values()  # of nn.DataParallel's replicas
        for tensor in held:
            if tensor is None or type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            key = id(storage)
            self._storages[key] = weakref.ref(storage, partial(_forget, weakref.ref(self), key))
            self._shapes |= {tensor.shape, tensor.shape[::-1]}

    def include(self, tensor: Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether a tensor that is saved lies in memory that stays."""
        known = self._storages.get(id(storage))
        if known is not None and known() is storage:
            return True
        if type(tensor) is nn.Parameter:
            return True
        base = base_of(tensor)
        if base is not None and isinstance(base, nn.Parameter):
            return True
        return (
            tensor.dtype in _LOW
            and tensor.requires_grad
            and tensor.shape in self._shapes
            and is_cast_of_parameter(tensor)
        )


def _forget(residents: weakref.ref[Residents], key: int, storage: weakref.ref[torch.UntypedStorage]) -> None:
    held = residents()
    if held is not None and held._storages.get(key) is storage:
        del held._storages[key]
