"""What made the memory that a forward pass saves, noted as it goes, so that it can be made again."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor

from retrograd.budget.op_info import Trait, find_trait, find_written
from retrograd.budget.origins import Direct, Operation, Origin, Part
from retrograd.budget.random_state import can_be_read, read_random_state
from retrograd.hooks.engine import current_graph_task, grad_enabled
from retrograd.hooks.operation_tap import copy_values, without_graph
from retrograd.hooks.saved import base_of, is_plain, version_of
from retrograd.policies.policy import Stays

_OPAQUE = object()
"""In place of a tensor that is no plain memory, or of which torch does not count writes."""

_BETWEEN_MARKS = 1 << 20
"""There are fewer operations between two marks."""

_Random = tuple[Tensor, torch.device]
"""State of a generator, and its device."""


class Tape:
    """Notes the operations of a pass, and finds out what made a stretch of memory.

    What is not wanted is still looked at for what it writes to, so that nothing false is known of any memory whatever
    is wanted: there is only less of which it is known how it was made.

    Args:
        least: bytes below which memory is held instead, by the operations that are given it.

    Attributes:
        stays: whether a tensor lies in memory that stays anyway.
        wanted: numbers of the operations to note; None for all. Those before the first mark all have the number −1,
            and are always wanted.
    """

    def __init__(self, least: int) -> None:
        self.stays: Stays = lambda tensor, storage: False
        self.wanted: frozenset[int] | None = None
        self._least = least
        self._count = -1
        self._origins: dict[int, Origin] = {}
        self._traits: dict[int, Trait] = {}  # by id, since torch hashes operations in Python

    def clear(self) -> None:
        """Forget all: another pass begins, of which all is wanted."""
        self._origins.clear()
        self._count = -1
        self.wanted = None

    def mark(self, number: int) -> None:
        """A place that every such pass comes to. From here on operations are numbered anew.

        What is carried out in one pass alone, such as by a compiler, shifts numbers no further than to the next mark.
        """
        self._count = number * _BETWEEN_MARKS

    def carry_out(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out an operation, and note it.

        Where no graph is made nothing is noted: compiled code, and kernels inside of custom Functions, write into the
        memory that operations have made, and nobody tells.
        """
        trait = self._traits.get(id(function)) or self._learn(function)
        is_in_forward = current_graph_task() == -1
        number = self._count
        if is_in_forward and number >= 0:
            self._count = number + 1
        if (
            not trait.is_noted
            or (self.wanted is not None and number >= 0 and number not in self.wanted)
            or not is_in_forward
            or not grad_enabled()
        ):
            if trait.written:
                self._forget(trait, args, kwargs)
            return trait.entry(*args, **kwargs)
        if trait.written:
            return self._write(trait, args, kwargs, number)
        random = _look_at_generator(args, kwargs) if trait.is_random else None
        result = trait.entry(*args, **kwargs)
        if random is not None or not trait.is_random:
            self._note_results(result, trait, args, kwargs, number, random)
        return result

    def find(self, storage: torch.UntypedStorage, version: int) -> Origin:
        """Where the contents of a storage come from."""
        known = self._origins.get(id(storage))
        if known is None or not known.is_of(storage, version):
            known = self._note(storage, version, None)
        return known

    def _learn(self, function: Any) -> Trait:
        trait = self._traits[id(function)] = find_trait(function)
        return trait

    def _note_results(
        self,
        result: Any,
        trait: Trait,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        number: int,
        random: _Random | None,
    ) -> None:
        """Note what an operation has made."""
        operation: Operation | None = None
        for output, tensor in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
            if isinstance(tensor, Tensor) and tensor.numel() * tensor.itemsize >= self._least and is_plain(tensor):
                operation = operation or self._make_operation(trait, args, kwargs, number, random)
                self._note(tensor.untyped_storage(), version_of(tensor), operation, output)

    def _write(self, trait: Trait, args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> Any:
        """Carry out an operation that writes into what it is given."""
        written = find_written(trait, args, kwargs)
        storages = [tensor.untyped_storage() for tensor in written if is_plain(tensor)]
        if len(storages) < len(written) or not any(storage.nbytes() >= self._least for storage in storages):
            self._forget(trait, args, kwargs)
            return trait.entry(*args, **kwargs)
        random = _look_at_generator(args, kwargs) if trait.is_random else None
        operation = None
        if len({id(storage) for storage in storages}) == 1 and (random is not None or not trait.is_random):
            operation = self._make_operation(trait, args, kwargs, number, random)
        if operation is not None and any(isinstance(operation.argument(*place), Direct) for place in trait.written):
            operation = None  # memory that stays would be written into once more
        before = [self.find(storage, version_of(tensor)) for tensor, storage in zip(written, storages, strict=True)]
        versions = [version_of(tensor) for tensor in written]
        result = trait.entry(*args, **kwargs)
        for storage, version, earlier in zip(storages, versions, before, strict=True):
            self._note(storage, version, operation).write(earlier)
        return result

    def _forget(self, trait: Trait, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What is about to be written to will not be what it was; torch need not count that."""
        for tensor in find_written(trait, args, kwargs):
            if not is_plain(tensor):  # nobody knows in which memory it lies
                self._origins.clear()
                return
            self._origins.pop(id(tensor.untyped_storage()), None)

    def _note(
        self, storage: torch.UntypedStorage, version: int, operation: Operation | None, output: int = 0
    ) -> Origin:
        key = id(storage)
        origin = Origin(storage, version, operation, output, partial(_drop, self._origins, key))
        self._origins[key] = origin
        return origin

    def _make_operation(
        self, trait: Trait, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, before: _Random | None
    ) -> Operation | None:
        """The operation with no big tensor in it; None where it was given what is no plain memory."""
        values = list(args)
        if trait.has_running and values[5]:  # in training
            values[3] = values[4] = None
        given: list[Part | Direct] = []
        for place in trait.tensors:
            if place < len(values):
                values[place] = self._describe(values[place], given)
                if values[place] is _OPAQUE:
                    return None
        named = {name: self._describe(value, given) for name, value in kwargs.items()} if kwargs else {}
        if any(value is _OPAQUE for value in named.values()):
            return None
        return Operation(trait.function, tuple(values), named, given, number, *(before or ()))

    def _describe(self, value: Any, given: list[Part | Direct]) -> Any:
        """What stands for a value; for a tensor, it is added to what is ``given``."""
        if isinstance(value, Tensor):
            if not is_plain(value) or value.is_inference():
                return _OPAQUE
            described = self._describe_tensor(value)
            given.append(described)
            return described
        if isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value):
            each_one = [self._describe(each, given) for each in value]
            return _OPAQUE if any(one is _OPAQUE for one in each_one) else each_one
        return value

    def _describe_tensor(self, tensor: Tensor) -> Part | Direct:
        storage = tensor.untyped_storage()
        is_small = storage.nbytes() < self._least
        leaf = tensor if tensor.is_leaf else base_of(tensor)
        if leaf is not None and leaf.is_leaf and (is_small or self.stays(tensor, storage)):
            return Direct(without_graph(tensor), leaf, version_of(leaf), storage.nbytes())
        if is_small:
            copy = copy_values(tensor)  # to hold it would hold its graph
            return Direct(copy, copy, version_of(copy), copy.untyped_storage().nbytes())
        origin = self.find(storage, version_of(tensor))
        bits = tensor.is_conj(), tensor.is_neg()
        return Part(origin, tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, bits)


def _look_at_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Random | None:
    """The state of the generator that an operation is about to draw from; None where it cannot be asked for."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator):
            return (value.get_state(), value.device) if can_be_read(value.device) else None
    device = next((value.device for value in args if isinstance(value, Tensor)), kwargs.get("device"))
    device = torch.device("cpu") if device is None else torch.device(device)
    return (read_random_state(device), device) if can_be_read(device) else None


def _drop(origins: dict[int, Origin], key: int, storage: weakref.ref[torch.UntypedStorage]) -> None:
    known = origins.get(key)
    if known is not None and known.storage is storage:
        del origins[key]
