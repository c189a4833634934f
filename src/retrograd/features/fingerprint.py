"""A short text that changes when a model does."""

from __future__ import annotations

import hashlib
import itertools

import torch
from torch import Tensor, nn

from retrograd.hooks.distributed import local_part, shard_again

_MOST_ELEMENTS = 1024


def fingerprint_model(model: nn.Module) -> str:
    """The model's type, and a hash of the names, shapes and types of its parameters and buffers and of some values.

    Of each plain tensor up to about 1,024 elements are read, evenly spaced: training changes nearly all of them. Of one
    that is sharded, they are those of this process.
    """
    shard_again(model)
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        digest.update(f"{name} {tensor.dtype}".encode())
        if not torch.nn.parameter.is_lazy(tensor):
            digest.update(str(tuple(tensor.shape)).encode())
            digest.update(_sample(tensor))
    return f"{type(model).__name__} {digest.hexdigest()}"


def _sample(tensor: Tensor) -> bytes:
    tensor = local_part(tensor)
    if isinstance(tensor, nn.Parameter):
        tensor = tensor.data
    has_memory = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type != "meta"
    if not has_memory or tensor.is_quantized:
        return b""
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, len(flat) // _MOST_ELEMENTS)].cpu().contiguous()
    return some.view(torch.uint8).numpy().tobytes() if len(some) else b""
