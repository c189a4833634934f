"""What autograd keeps, counted by other means: by saved-tensor hooks, in a run of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


@dataclass
class Count:
    """Bytes of what was packed, without parameters and buffers: each tensor, and each piece of memory once."""

    asked: int = 0
    resident: int = 0
    tensors: int = 0


def count_packed(models: Iterable[nn.Module], step: Callable[[], object]) -> Count:
    """Run a forward and backward, and count. All memory is kept until the end, so that no address comes twice."""
    count = Count()
    permanent = {
        tensor.untyped_storage().data_ptr() for model in models for tensor in (*model.parameters(), *model.buffers())
    }
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in permanent:
            count.tensors += 1
            count.asked += tensor.numel() * tensor.element_size()
            kept.setdefault(storage.data_ptr(), storage)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    count.resident = sum(storage.nbytes() for storage in kept.values())
    return count
