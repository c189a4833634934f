"""Tensors that are spread over processes, so that each holds a part of their elements."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether it knows of the parts that other processes hold: a ``DTensor``, as FSDP2 and tensor parallelism make."""
    return hasattr(tensor, "full_tensor")


def is_summand(tensor: Tensor) -> bool:
    """Whether it is this process's addend of a sum that nobody has formed yet: a ``DTensor`` that is partial."""
    return type(tensor) is not Tensor and any(each.is_partial() for each in getattr(tensor, "placements", ()))


def is_flattened(parameter: Tensor) -> bool:
    """Whether it is one of ``FullyShardedDataParallel`` (FSDP1): a part that nothing tells from a whole."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


def local_part(tensor: Any) -> Any:
    """What this process holds of a tensor, in the same memory; waits for the collective that still brings it."""
    part = tensor.to_local() if is_sharded(tensor) else tensor
    return part.trigger_wait() if type(part).__name__ == "AsyncCollectiveTensor" else part


def shard_again(model: nn.Module) -> None:
    """Let each process hold its part alone of the parameters that a forward under FSDP2 has put together."""
    for module in model.modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            module.reshard()  # type: ignore[operator]
