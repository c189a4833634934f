"""What the processes of a run hold of one tensor: the same, a part each, a summand each, or each something of its own.

Read from what is there: meshes and placements of ``DTensor``s, the groups of wrappers, and for a plain tensor under
tensor parallelism the nodes behind it, down to where it left a ``DTensor``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from retrograd.hooks.nodes import is_leaf
from retrograd.hooks.sharding import is_sharded

Holds = Literal["copy", "shard", "summand", "own"]

_MOST_NODES = 100_000
"""Nodes that are looked at, at most, to tell what a plain tensor was made of."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What this process holds at a site.

    Attributes:
        holds: ``copy``: the same as others; ``shard``: a part of a tensor that others hold the rest of; ``summand``:
            its addend of a sum that nobody has formed; ``own``: a tensor of its own, as of other data or another layer.
        ranks: the processes that hold the very same elements, this one among them, rising.
        spec: torch's words for it, where it has some.
    """

    holds: Holds
    ranks: tuple[int, ...]
    spec: str = ""


def is_distributed() -> bool:
    """Whether this process is one of several that know of each other."""
    return torch.distributed.is_available() and torch.distributed.is_initialized() and _world_size() > 1


def _world_size() -> int:
    return torch.distributed.get_world_size()


def own_rank() -> int:
    """The number of this process."""
    return torch.distributed.get_rank()


def place_own() -> Placement:
    """Each process has its own."""
    return Placement("own", (own_rank(),))


def place_copies(ranks: Iterable[int]) -> Placement:
    """These have the same."""
    found = tuple(sorted({own_rank(), *ranks}))
    return Placement("copy" if len(found) > 1 else "own", found)


def place_spread(tensor: Any, beside: Iterable[int] = ()) -> Placement:
    """The placement of a ``DTensor``; ``beside`` are processes that have the same where its mesh does not say more."""
    found = _read_spec(tensor._spec)
    others = set(beside) - {own_rank()}
    if not others or others & set(_mesh_of(tensor).mesh.flatten().tolist()):
        return found
    return replace(found, ranks=tuple(sorted({*found.ranks, *others})))


def find_tensor_parallel_ranks(model: nn.Module) -> tuple[int, ...]:
    """The processes that share one forward of a model with this one, this one among them; empty where none do.

    They are found along those dimensions of the parameters' meshes along which FSDP2 does not hand out data.
    """
    found: set[int] = set()
    for module, data in walk_data_ranks(model):
        for parameter in module._parameters.values():
            if parameter is not None and is_sharded(parameter):
                found.update(_ranks_beside(_mesh_of(parameter), data))
    return tuple(sorted(found)) if len(found) > 1 else ()


class PlainPlacements:
    """Placements of plain tensors in a model under tensor parallelism.

    Args:
        ranks: the processes that share a forward with this one.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    def place(self, tensor: Tensor) -> Placement:
        """A tensor is the same in all those processes unless something that it was computed of is not.

        Data and plain parameters are taken to be the same, as tensor parallelism asks for.
        """
        same = set(self.ranks)
        holds: Holds = "own"
        for spec in _find_specs(tensor):
            placement = _read_spec(spec)
            same &= {*placement.ranks}
            if placement.holds in ("shard", "summand"):
                holds = "shard"
        if len(same) > 1:
            return place_copies(same)
        return Placement(holds, (own_rank(),))


def _find_specs(tensor: Tensor) -> list[Any]:
    """The specifications of the ``DTensor``s that a plain tensor was computed of."""
    specs: list[Any] = []
    seen: set[Any] = set()
    queue: list[Any] = [tensor.grad_fn]
    while queue and len(seen) < _MOST_NODES:
        node = queue.pop()
        if node is None or node in seen or is_leaf(node):
            continue
        seen.add(node)
        spec = getattr(node, "dtensor_spec", None)
        if spec is not None:
            specs.append(spec)
        else:
            queue.extend(following for following, _ in node.next_functions)
    return specs


def _mesh_of(tensor: Any) -> Any:
    return tensor.device_mesh


def _read_spec(spec: Any) -> Placement:
    mesh, placements = spec.mesh, spec.placements
    coordinate = mesh.get_coordinate()
    text = f"{tuple(placements)} on {tuple(mesh.shape)}"
    if coordinate is None:
        return Placement("own", (own_rank(),), text)
    line = tuple(
        slice(None) if each.is_replicate() else place for each, place in zip(placements, coordinate, strict=True)
    )
    ranks = tuple(sorted(torch.as_tensor(mesh.mesh[line]).flatten().tolist()))
    if any(each.is_partial() for each in placements):
        return Placement("summand", ranks, text)
    if not all(each.is_replicate() for each in placements):
        return Placement("shard", ranks, text)
    return Placement("copy" if len(ranks) > 1 else "own", ranks, text)


def walk_data_ranks(model: nn.Module) -> Iterable[tuple[nn.Module, frozenset[int]]]:
    """Modules, each with the processes among which FSDP2 shards its parameters."""
    found: dict[str, frozenset[int]] = {}
    for name, module in model.named_modules():
        above = found.get(name.rpartition(".")[0], frozenset()) if name else frozenset()
        found[name] = _ranks_of_fsdp(module) or above
        yield module, found[name]


def _ranks_of_fsdp(module: nn.Module) -> frozenset[int]:
    if not any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
        return frozenset()
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    meshes = [group.mesh_info.mesh for group in groups if group is not None]
    return frozenset(rank for mesh in meshes for rank in mesh.mesh.flatten().tolist())


def _ranks_beside(mesh: Any, data: frozenset[int]) -> set[int]:
    """This process's neighbours along the dimensions of a mesh that leave its share of the data."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return set()
    line = []
    for dimension, place in enumerate(coordinate):
        along = tuple(slice(None) if each == dimension else at for each, at in enumerate(coordinate))
        neighbours = set(mesh.mesh[along].tolist())
        line.append(place if neighbours <= data else slice(None))
    return set(torch.as_tensor(mesh.mesh[tuple(line)]).flatten().tolist())
