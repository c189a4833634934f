"""A program in several processes: which process this is, its part of a tensor, and how gradients are reduced.

What the processes hold of one tensor is the same, a part each, a summand each, or each something of its own. It is read
from what is there: meshes and placements of ``DTensor``s, the groups of wrappers, and for a plain tensor under tensor
parallelism the nodes behind it, down to where it left a ``DTensor``.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from retrograd.core.hooks.module import CallTap
from retrograd.core.hooks.names import fsdp_groups, fsdp_parameters
from retrograd.core.hooks.nested import flatten
from retrograd.core.hooks.nodes import is_leaf
from retrograd.core.hooks.parts import modules_of
from retrograd.core.identities import IdentitySet
from retrograd.core.norms import join_norms, summing_type


def count_processes() -> int:
    """In how many processes that have found each other the program runs."""
    return torch.distributed.get_world_size() if is_connected() else 1


def has_other_processes() -> bool:
    """Tell whether the program runs in several processes that have found each other."""
    return count_processes() > 1


def own_rank() -> int:
    """The number of this process; before they have found each other, what the launcher says; 0 for a single one."""
    return torch.distributed.get_rank() if is_connected() else int(os.environ.get("RANK", "0"))


def describe_process() -> str | None:
    """Name this process among several, ``"0 of 2"``; None where it is the only one."""
    return f"{own_rank()} of {torch.distributed.get_world_size()}" if has_other_processes() else None


def is_connected() -> bool:
    """Tell whether the processes of the program, which may be one alone, have found each other."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_sharded(tensor: Tensor) -> bool:
    """Tell whether a tensor knows of the parts in other processes: a ``DTensor``, as FSDP2 and the like make."""
    return hasattr(tensor, "full_tensor")


def is_summand(tensor: Tensor) -> bool:
    """Tell whether it is this process's addend of a sum that nobody has formed yet: a ``DTensor`` that is partial."""
    return type(tensor) is not Tensor and any(each.is_partial() for each in getattr(tensor, "placements", ()))


def is_flattened(parameter: Tensor) -> bool:
    """Tell whether it is one of ``FullyShardedDataParallel`` (FSDP1): a part that nothing tells from a whole."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


def local_part(tensor: Any) -> Any:
    """This process's part of a tensor, in the same memory; waits for the collective that still brings it."""
    part = tensor.to_local() if is_sharded(tensor) else tensor
    return part.trigger_wait() if type(part).__name__ == "AsyncCollectiveTensor" else part


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
    return Placement("own", (own_rank(),))


def place_copies(ranks: Iterable[int]) -> Placement:
    """The placement of a tensor of which each of these processes has the same copy."""
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
        return Placement(holds, (own_rank(),))


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
        """Tell whether a tensor is cut where that one was, so that the shape of the whole is known."""
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


#
# DDP leaves in ``.grad`` the mean over all processes once a pass is over, or, under ``no_sync()``, what this process
# has found alone. FSDP2 puts this process's part of the mean there, and without reduction nothing.


class Exchange:
    """A reduction of the gradients of some parameters over all processes.

    Attributes:
        ranks: the processes that get the very same gradients; empty where each gets a part.
    """

    ranks: tuple[int, ...] = ()

    def __init__(self, parameters: Collection[Tensor]) -> None:
        self._parameters = WeakIdKeyDictionary(dict.fromkeys(parameters))

    def reduces(self, parameter: Tensor) -> bool:
        """Tell whether the gradient of this parameter is among them."""
        return parameter in self._parameters

    def has_begun(self) -> bool:
        """Tell whether the reduction of gradients that came in a pass has begun; asked after such a pass."""
        return True

    def has_ended(self) -> bool:
        """Tell whether all gradients have been reduced."""
        return True

    def find_wholes(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Each parameter of which a process holds a part, and the whole one that graphs end at, where there is one."""
        return ()

    def close(self) -> None:
        """Begin anew: the reduced gradients have been seen."""

    def remove(self) -> None:
        """Take all hooks away."""


class Sharding(Exchange):
    """FSDP2: a gradient that is there is reduced. What a process finds itself comes at the whole parameter.

    Args:
        modules: those at which parameters are sharded; they are not held.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        super().__init__([each.parameter for module in modules for each in fsdp_parameters(module)])
        self._modules = IdentitySet(modules)

    def find_wholes(self) -> Iterator[tuple[Tensor, Tensor]]:
        for module in list(self._modules):
            for each in fsdp_parameters(module):
                if each.whole is not None:
                    yield each.parameter, each.whole


class Averaging(Exchange):
    """A ``DistributedDataParallel``. It reduces in the pass after a forward with grad, outside of ``no_sync()``."""

    def __init__(self, wrapper: Any) -> None:
        ignored = wrapper.parameters_to_ignore
        super().__init__([each for name, each in wrapper.module.named_parameters() if name not in ignored])
        self.ranks = tuple(torch.distributed.get_process_group_ranks(wrapper.process_group))
        self._wrapper = weakref.ref(wrapper)
        self._is_due = False
        self._tap = CallTap(wrapper, self, outermost=True)

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The wrapper is called."""
        if torch.is_grad_enabled() and module.require_backward_grad_sync and not is_rehearsal():
            self._is_due = True

    def after_call(self, module: nn.Module, output: Any) -> None:
        """Do nothing at the end of a call."""

    def has_begun(self) -> bool:
        return self._is_due or _is_reduced_by_stage(self._wrapper())

    def has_ended(self) -> bool:
        wrapper: Any = self._wrapper()
        if wrapper is None:
            return False
        try:
            wrapper._check_reducer_finalized()
        except RuntimeError:  # some parameters are still to have their gradients, in another pass
            return False
        return True

    def close(self) -> None:
        self._is_due = False

    def remove(self) -> None:
        self._tap.remove()


def find_sharding(model: nn.Module) -> Sharding | None:
    """Find out whether FSDP2 reduces gradients of a model."""
    modules = [module for module in modules_of(model) if fsdp_groups(module)]
    return Sharding(modules) if modules else None


def is_averaging(module: nn.Module) -> bool:
    """Tell whether it is a ``DistributedDataParallel`` of several processes; one alone has nothing to reduce."""
    return type(module).__name__ == "DistributedDataParallel" and module.process_group.size() > 1  # type: ignore[operator]


def running_wrapper() -> nn.Module | None:
    """The ``DistributedDataParallel`` whose forward runs now."""
    parallel: Any = sys.modules.get("torch.nn.parallel.distributed")
    return parallel.DistributedDataParallel._active_ddp_module if parallel is not None else None


_STAGES = "torch.distributed.pipelining.stage"

_FORWARD = ("forward_one_chunk",)
"""The method of torch's stages that runs a part of the model on one micro-batch."""

_BACKWARD = ("backward_maybe_with_nosync",)
"""The method that runs a backward pass of a stage."""

_REHEARSAL = ("_forward_metadata_inference", "_backward_metadata_inference", "_shape_inference")
"""Functions that run a stage before the first step, on memory that nobody has written to, to learn the shapes."""


def may_have_stages() -> bool:
    """Tell whether the program may run stages of a pipeline at all."""
    return _STAGES in sys.modules


def running_stage() -> int | None:
    """The index, in the whole pipeline, of the stage whose forward runs in this thread; None where none does."""
    stage = _find_stage(_FORWARD)
    return None if stage is None else int(stage.stage_index)


def _is_reduced_by_stage(wrapper: Any) -> bool:
    """Tell whether a stage runs the last pass of a step, in which it has this wrapper reduce though no forward did."""
    found = _find_frame(_BACKWARD) if wrapper is not None else None
    return found is not None and found.f_locals["self"].submod is wrapper and bool(found.f_locals.get("last_backward"))


def is_second_half() -> bool:
    """Tell whether a stage in this thread runs the half of a backward pass that is for the parameters alone.

    It begins at gradients that the half before it has computed, so that hooks on tensors see these once more.
    """
    found = _find_frame(_BACKWARD)
    return found is not None and found.f_locals.get("backward_type") == "weight"


def is_rehearsal() -> bool:
    """Tell whether a stage in this thread runs its part of the model for the shapes alone."""
    return _find_stage(_REHEARSAL) is not None


def _find_stage(methods: Collection[str]) -> Any:
    """The stage of which one of these methods runs in this thread."""
    frame = _find_frame(methods)
    return None if frame is None else frame.f_locals["self"]


def _find_frame(methods: Collection[str]) -> FrameType | None:
    """The call of one of these methods of a stage that runs in this thread."""
    pipelining: Any = sys.modules.get(_STAGES)
    frame = None if pipelining is None else sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name in methods else None
        if isinstance(owner, pipelining._PipelineStageBase):
            return frame
        frame = frame.f_back
    return None


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
