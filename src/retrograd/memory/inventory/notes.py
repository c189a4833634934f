"""Records of saved tensors while a program runs: plain data that keeps no tensor and no graph alive."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from retrograd.core.hooks.nodes import LEAF_NUMBER, edges_of, identity_of, is_leaf, name_of, number_of, variable_of
from retrograd.core.hooks.storages import ModuleArguments, ParameterStorages, hold_key, key_of, storages_of
from retrograd.following.graph.walker import shape_of
from retrograd.memory.inventory.costs import is_view

HeldBy = Literal["saved", "attribute", "hooks", "checkpoint", "argument"]
"""Who holds a tensor: torch for the node; the node of a Python Function as an attribute; somebody's saved-tensor hooks,
in what they have packed it into; a checkpoint that has run its function again; a checkpoint as an argument of it."""


class Maker(NamedTuple):
    """The operation that made a tensor.

    Attributes:
        node: kind of its node.
        number: the node's sequence number.
        sources: numbers of the nodes that made what it was given; leaves have none.
    """

    node: str
    number: int
    sources: tuple[int, ...] = ()


class TensorNotes(NamedTuple):
    """A tensor, and the memory that it keeps. Its fields but the last are columns of the table.

    Attributes:
        shape: sizes; None for nested tensors.
        strides: in elements; None where there is no such thing.
        offset: where in its memory it begins, in elements.
        asked: bytes of its elements, each counted once for each place in the shape.
        storages, storage_bytes: number and bytes of each piece of memory.
        kind: ``parameter``, ``parameter view``, ``buffer``, ``buffer view``, ``cast``, ``input`` or ``intermediate``.
        name: name of that parameter or buffer.
        version: how often its memory had been written to.
        maker: what made it; None if that was not recorded.
    """

    shape: tuple[int, ...] | None
    dtype: str
    device: str
    strides: tuple[int, ...] | None
    offset: int
    asked: int
    storages: tuple[int, ...]
    storage_bytes: tuple[int, ...]
    kind: str
    name: str
    version: int | None
    maker: Maker | None


@dataclass(slots=True)
class SlotNotes:
    """A tensor that a node keeps.

    Attributes:
        tensor: None for as long as it is not there: a checkpoint has not run again.
        holder: identity of the checkpoint's holder that stands for it.
        frame: number of the checkpoint; 0 for none.
        packed: when a checkpoint has recomputed it, by ``time.perf_counter_ns``.
    """

    slot: str
    held: HeldBy
    tensor: TensorNotes | None
    holder: int = 0
    frame: int = 0
    packed: int | None = None


@dataclass(slots=True)
class NodeNotes:
    """A node that keeps tensors.

    Attributes:
        number: its sequence number.
        seen: when it was found, by ``time.perf_counter_ns``: it was made before.
        thread: number of the thread that found it.
        runs: when it began to run, each time.
        released: index of the run that freed what it kept; None if none has.
    """

    name: str
    number: int
    seen: int
    thread: int
    slots: list[SlotNotes]
    runs: list[int] = field(default_factory=list)
    released: int | None = None


_OUTPUTS = re.compile(r"result\d*|output\d*|out|log_?sumexp|buffer|indices|grad_input\d*")
"""Names that torch gives to what an operation has returned, and not been given."""

_CASTS = "ToCopyBackward"


class StorageNumbers:
    """Numbers for pieces of memory, the same for the same memory; memory that comes later never gets an old number."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[int, object]] = {}
        self._count = 0

    def number(self, storage: torch.UntypedStorage) -> int:
        """The number of this memory."""
        key = key_of(storage)
        known = self._numbers.get(key)
        if known is None:
            known = self._numbers[key] = self._count, hold_key(storage)
            self._count += 1
        return known[0]


class TensorDescriber:
    """Describes the tensors that one graph keeps.

    Args:
        storages: numbers of memory.
        parameters: memory of parameters and buffers.
        arguments: memory of what was handed to modules.
    """

    def __init__(self, storages: StorageNumbers, parameters: ParameterStorages, arguments: ModuleArguments) -> None:
        self._storages = storages
        self._parameters = parameters
        self._arguments = arguments
        self._makers: dict[tuple[int, int], Maker] = {}
        """By identity and number: nodes themselves would keep the graph alive."""

    def describe(self, tensor: Tensor, node: Any = None, slot: str = "") -> TensorNotes:
        """Record what a tensor is; one that this node keeps under this name may be what its operation has returned."""
        pieces = list(storages_of(tensor))
        kind, name, maker = self._classify(tensor, pieces, node, slot)
        shape = shape_of(tensor)
        is_plain = tensor.layout is torch.strided and shape is not None
        return TensorNotes(
            shape=shape,
            dtype=str(tensor.dtype).removeprefix("torch."),
            device=str(tensor.device),
            strides=tuple(tensor.stride()) if is_plain else None,
            offset=int(tensor.storage_offset()) if is_plain else 0,
            asked=tensor.numel() * tensor.element_size() if is_plain else sum(count for _, count in pieces),
            storages=tuple([self._storages.number(storage) for storage, _ in pieces]),
            storage_bytes=tuple([count for _, count in pieces]),
            kind=kind,
            name=name,
            version=None if tensor.is_inference() else tensor._version,
            maker=maker,
        )

    def _classify(
        self, tensor: Tensor, pieces: list[tuple[torch.UntypedStorage, int]], node: Any, slot: str
    ) -> tuple[str, str, Maker | None]:
        for storage, _ in pieces:
            found = self._parameters.describe(storage, tensor)
            if found is not None:
                return *found, None
            if key_of(storage) in self._arguments:
                return "input", "", None
        maker = _skip_views(tensor.grad_fn)
        if maker is None:
            return "intermediate", "", self._maker(node) if node is not None and is_output(slot) else None
        if is_leaf(maker):
            return "intermediate", "", None
        parameter = self._find_cast(maker)
        if parameter is not None:
            return "cast", parameter, self._maker(maker)
        return "intermediate", "", self._maker(maker)

    def _find_cast(self, maker: Any) -> str | None:
        """Name of the parameter that this node has brought into another type; None if it has not."""
        if not name_of(maker).startswith(_CASTS):
            return None
        source = _skip_views(edges_of(maker)[0][0])
        leaf = variable_of(source) if source is not None else None
        for storage, _ in storages_of(leaf) if leaf is not None else ():
            found = self._parameters.find(storage)
            if found is not None:
                return found.name
        return None

    def _maker(self, node: Any) -> Maker:
        key = identity_of(node)
        known = self._makers.get(key)
        if known is None:
            made_by = (_skip_views(following) for following, _ in edges_of(node))
            numbers = (number_of(each) for each in made_by if each is not None)
            sources = tuple(dict.fromkeys(number for number in numbers if number < LEAF_NUMBER))
            known = self._makers[key] = Maker(name_of(node), key[1], sources)
        return known


def is_output(slot: str) -> bool:
    """Return whether a slot of this name keeps what its operation has returned."""
    return _OUTPUTS.fullmatch(slot) is not None


def _skip_views(node: Any) -> Any:
    """The node that made the memory which this one gives a view of."""
    while node is not None and not is_leaf(node) and is_view(name_of(node)):
        node = edges_of(node)[0][0]
    return node
