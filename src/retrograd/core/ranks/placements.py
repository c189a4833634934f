"""What the processes of a program hold of a tensor.

That is the same, a part each, a summand each, or each something of its own. It is read
from what is there: meshes and placements of ``DTensor``s, the groups of wrappers, and for a plain tensor under tensor
parallelism the nodes behind it, down to where it left a ``DTensor``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from retrograd.core.hooks.names import fsdp_groups
from retrograd.core.hooks.nested import flatten
from retrograd.core.hooks.nodes import is_leaf
from retrograd.core.hooks.parts import modules_of
from retrograd.core.ranks.processes import ask_rank


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor knows of the parts in other processes: a ``DTensor``, as FSDP2 and the like make."""
    return hasattr(tensor, "full_tensor")


def is_summand(tensor: Tensor) -> bool:
    """Return whether it is this process's addend of a sum that nobody has formed yet: a ``DTensor`` that is partial."""
    return type(tensor) is not Tensor and any(each.is_partial() for each in getattr(tensor, "placements", ()))


def is_flattened(parameter: Tensor) -> bool:
    """Return whether it is one of ``FullyShardedDataParallel`` (FSDP1): a part that nothing tells from a whole."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


def local_part(tensor: Any) -> Any:
    """This process's part of a tensor, in the same memory; waits for the collective that still brings it."""
    part = tensor.to_local() if is_sharded(tensor) else tensor
    return part.trigger_wait() if type(part).__name__ == "AsyncCollectiveTensor" else part


def own_values(tensor: Any) -> Tensor:
    """What this process has of a tensor, in the same memory and without a graph."""
    found: Tensor = local_part(tensor.detach())
    return found


def whole_of(tensor: Any) -> Tensor:
    """All elements of a tensor that is spread over processes, in each of them: a collective, unless all have them."""
    found: Tensor = tensor.full_tensor()
    return found


def spread_part(part: Tensor, like: Any) -> Tensor:
    """The tensor of which each process has given its part, spread in the way of another one."""
    found: Tensor = type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return found


def spread_whole(whole: Tensor, like: Any) -> Tensor:
    """A tensor that each process has, spread in the way of another one; nothing is left to be summed up."""
    copy = sys.modules["torch.distributed.tensor"].Replicate()  # there already, if there is such a tensor
    everywhere = [copy] * len(like.placements)
    placements = [copy if each.is_partial() else each for each in like.placements]
    copies = type(like).from_local(whole, like.device_mesh, everywhere, run_check=False)
    found: Tensor = copies.redistribute(placements=placements)
    return found


def add_over_parts(number: Tensor, like: Any) -> Tensor:
    """The sum of one number a process over all that hold different parts of a tensor: one collective."""
    kinds = sys.modules["torch.distributed.tensor"]
    placements = [kinds.Replicate() if each.is_replicate() else kinds.Partial() for each in like.placements]
    return whole_of(type(like).from_local(number, like.device_mesh, placements, run_check=False))


def shard_again(model: nn.Module) -> None:
    """Let each process hold its part alone of the parameters that a forward under FSDP2 has put together."""
    for module in modules_of(model):
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            module.reshard()  # type: ignore[operator]


Holds = Literal["copy", "shard", "summand", "own"]

_MOST_NODES = 100_000
"""Nodes that are looked at, at most, to tell what a plain tensor was made of."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The part of a site's tensor that this process holds.

    Attributes:
        holds: ``copy``: the same as others; ``shard``: a part of a tensor that others hold the rest of; ``summand``:
            its addend of a sum that nobody has formed; ``own``: a tensor of its own, as of other data or another layer.
        ranks: the processes that hold the very same elements, this one among them, rising.
        spec: torch's words for it, where it has some.
    """

    holds: Holds
    ranks: tuple[int, ...]
    spec: str = ""


def place_own() -> Placement:
    """Each process has its own."""
    return Placement("own", (ask_rank(),))


def place_copies(ranks: Iterable[int]) -> Placement:
    """The placement of a tensor of which each of these processes has the same copy."""
    found = tuple(sorted({ask_rank(), *ranks}))
    return Placement("copy" if len(found) > 1 else "own", found)


def place_spread(tensor: Any, beside: Iterable[int] = ()) -> Placement:
    """The placement of a ``DTensor``; ``beside`` are processes that have the same where its mesh does not say more."""
    found = _read_spec(tensor._spec)
    others = set(beside) - {ask_rank()}
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
        self._data: set[int] = set()

    def see_data(self, arguments: Any) -> None:
        """Remember where the tensors lie that a model is called with."""
        if self.ranks:
            tensors = (tensor for _, tensor in flatten(arguments, ()) if not is_sharded(tensor))
            self._data = {_address_of(tensor) for tensor in tensors} - {0}

    def place(self, tensor: Tensor) -> Placement | None:
        """A tensor is the same in all those processes unless something that it was computed of is not.

        Data and plain parameters are taken to be the same, as tensor parallelism asks for. None where nothing tells:
        what is no data, and computed without grad.
        """
        if tensor.grad_fn is None:
            return place_copies(self.ranks) if _address_of(tensor) in self._data else None
        same = set(self.ranks)
        holds: Holds = "own"
        for spec in _find_specs(tensor):
            placement = _read_spec(spec)
            same &= {*placement.ranks}
            if placement.holds in ("shard", "summand"):
                holds = "shard"
        if len(same) > 1:
            return place_copies(same)
        return Placement(holds, (ask_rank(),))


@dataclass(frozen=True, slots=True)
class PlainShare:
    """What a plain tensor is this process's part of: the ``DTensor`` that it has just left.

    Attributes:
        mesh, placements: of that.
        shape: of that.
        local_shape: of the part.
        keeps_gradient: the gradient of the part lies as the part does.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    keeps_gradient: bool

    def fits(self, part: Tensor) -> bool:
        """Return whether a tensor is cut where that one was, so that the shape of the whole is known."""
        dims = [each.dim for each in self.placements if each.is_shard()]
        return part.dim() == len(self.shape) and all(part.shape[dim] == self.local_shape[dim] for dim in dims)

    def join(self, part: Tensor) -> Tensor:
        """The ``DTensor`` of which each process has its part; what is done to it has a derivative."""
        cut = {each.dim for each in self.placements if each.is_shard()}
        shape = torch.Size(self.shape[dim] if dim in cut else size for dim, size in enumerate(part.shape))
        stride = torch.empty(shape, device="meta").stride()
        kind = sys.modules["torch.distributed.tensor"].DTensor
        found: Tensor = kind.from_local(part, self.mesh, self.placements, run_check=False, shape=shape, stride=stride)
        return found


def find_share(tensor: Tensor) -> PlainShare | None:
    """What a plain tensor is a part of; None where it does not come right out of a ``DTensor`` that is cut up."""
    node: Any = tensor.grad_fn
    spec = getattr(node, "dtensor_spec", None)
    if spec is None:
        return None
    placements = tuple(spec.placements)
    if not all(each.is_shard() or each.is_replicate() for each in placements):
        return None
    kept = node.grad_placements is None or tuple(node.grad_placements) == placements
    return PlainShare(spec.mesh, placements, tuple(spec.shape), tuple(tensor.shape), kept)


def _address_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


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
        return Placement("own", (ask_rank(),), text)
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
    for name, module in nn.Module.named_modules(model):
        above = found.get(name.rpartition(".")[0], frozenset()) if name else frozenset()
        found[name] = _ranks_of_fsdp(module) or above
        yield module, found[name]


def _ranks_of_fsdp(module: nn.Module) -> frozenset[int]:
    meshes = [group.mesh_info.mesh for group in fsdp_groups(module)]
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
