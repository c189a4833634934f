"""The norm of several tensors, and a factor for all of them, where some are spread over processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core.hooks.live_objects import list_instances
from retrograd.core.norms import join_norms, summing_type
from retrograd.core.ranks.placements import is_flattened, is_sharded, local_part


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """√Σ|x|² over all elements of all tensors, in float32 or better: a scalar on the device of the first.

    Of sharded tensors it is the norm over the elements of all processes, and the same number on each: one collective
    for all that are sharded in the same way.

    Args:
        tensors: at least one; on any devices, sparse ones among them.
    """
    device = tensors[0].device
    whole = [
        tensor.coalesce()._values() if tensor.is_sparse else tensor for tensor in tensors if not is_sharded(tensor)
    ]
    norms = [norm.to(device, torch.float64) for norm in _find_norms(whole)]
    sharded: dict[Any, list[Any]] = {}
    for tensor in tensors:
        if is_sharded(tensor):
            way = (tensor.device_mesh, tensor.placements, tensor.dtype)  # type: ignore[attr-defined]
            sharded.setdefault(way, []).append(tensor)
    for same in sharded.values():
        joined: Any = torch.linalg.vector_norm(torch.stack(_find_norms(same)), dtype=torch.float64)
        norms.append(joined.full_tensor().to(device))
    return join_norms(norms)


def scale_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all tensors by a scalar, in place; of sharded ones each process multiplies its part."""
    parts = [local_part(tensor) for tensor in tensors]
    for device in dict.fromkeys(part.device for part in parts):
        same = [part for part in parts if part.device == device]
        torch._foreach_mul_(same, factor.to(device, non_blocking=True))


def _find_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    norms: list[Tensor] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype is dtype]
        wide = summing_type(dtype)
        norms += torch._foreach_norm(same, 2.0, dtype=wide if wide is not dtype else None)
    return norms


# ---- gradients that FSDP1 hands out in stretches ----
#
# Of a parameter that it has flattened each process has a stretch, or nothing, and nothing leads from there to others.


class FlatGradients:
    """Gradients of parameters some of which FSDP1 may have flattened."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._groups: list[tuple[Any, set[int]]] = []

    def measure_norm(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """The norm of all gradients, the same in each process; None where no process can have any.

        One collective for each process group that has parameters in stretches, to which all its processes come.
        """
        flattened = [id(each) for each in parameters if is_flattened(each)]
        if not self._known.issuperset(flattened):
            self._known, self._groups = set(flattened), _find_groups(flattened)
        apart = set().union(*(members for _, members in self._groups))
        norms = [self._join(group, [each for each in parameters if id(each) in own]) for group, own in self._groups]
        rest = [each.grad for each in parameters if each.grad is not None and id(each) not in apart]
        if rest:
            norms.append(total_norm(rest))
        return join_norms(norms) if norms else None

    @staticmethod
    def _join(group: Any, parameters: list[Tensor]) -> Tensor:
        gradients = [each.grad for each in parameters if each.grad is not None]  # an empty stretch has none
        square = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
        if gradients:
            square += total_norm(gradients).square()
        torch.distributed.all_reduce(square, group=group)
        return square.sqrt()


def _find_groups(flattened: list[int]) -> list[tuple[Any, set[int]]]:
    """Process groups, each with those of the parameters that are in stretches all over it.

    A wrapper leads to its parameters, and they not to it, so all modules of the process are looked at. The groups come
    in the order of the parameters, which all processes share.
    """
    groups: dict[int, tuple[Any, set[int]]] = {}
    for thing in list_instances(nn.Module):
        if type(thing).__name__ != "FullyShardedDataParallel":
            continue
        handle = getattr(thing, "_handle", None)
        if handle is None or not handle.uses_sharded_strategy:  # else each process has the whole
            continue
        parts = handle.flat_param._params if handle._use_orig_params else [handle.flat_param]
        own = {id(each) for each in parts}.intersection(flattened)
        if own:
            group = handle.process_group
            groups.setdefault(id(group), (group, set()))[1].update(own)
    return sorted(groups.values(), key=lambda found: min(flattened.index(each) for each in found[1]))
