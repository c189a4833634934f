"""What made the memory that a forward pass saves, noted as it goes, so that it can be made again."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from retrograd.hooks.dispatch import is_operation, is_random
from retrograd.hooks.engine import current_graph_task
from retrograd.hooks.saved import base_of, is_plain, set_bits, version_of, view_storage
from retrograd.saved.origins import Direct, Operation, Origin, Part
from retrograd.saved.policy import Stays
from retrograd.saved.random_state import can_be_read, read_random_state

_UNREPEATABLE = frozenset({
    "set_", "resize_", "resize_as_", "bincount", "histc", "index_add", "index_add_", "index_put", "index_put_",
    "_index_put_impl_", "put", "put_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_",
})  # fmt: skip
"""They take memory from elsewhere, or add up in an order that is not the same twice on every device."""

_RUNNING = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
"""They write into running statistics without saying so. While training they do not read them."""

_OPAQUE = object()
"""In place of a tensor that is no plain memory."""

_Random = tuple[Tensor, torch.device]
"""State of a generator, and its device."""


@dataclass(frozen=True, slots=True)
class Trait:
    """What is known of a kind of operation.

    Attributes:
        written: places and names of the arguments that it writes to.
        is_random: it draws from the generator of the device.
        has_running: it has running statistics, which it must not count again.
    """

    written: tuple[tuple[int, str], ...]
    is_random: bool
    has_running: bool


class Tape:
    """Notes the operations of a pass, and finds out what made a stretch of memory.

    Args:
        least: bytes below which memory is held instead, by the operations that are given it.

    Attributes:
        stays: whether a tensor lies in memory that stays anyway.
    """

    def __init__(self, least: int) -> None:
        self.stays: Stays = lambda tensor, storage: False
        self._least = least
        self._origins: dict[int, Origin] = {}
        self._traits: dict[Any, Trait | None] = {}

    def clear(self) -> None:
        """Forget all: another pass begins."""
        self._origins.clear()

    def carry_out(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out an operation, and note it."""
        if function in self._traits:
            trait = self._traits[function]
        else:
            trait = self._traits[function] = _find_trait(function)
        if trait is None or current_graph_task() != -1:  # a backward pass: nothing in it is saved for one
            return function(*args, **kwargs)
        random = _look_at_generator(args, kwargs) if trait.is_random else None
        if trait.is_random and random is None:
            return function(*args, **kwargs)
        if trait.written:
            return self._write(function, trait, args, kwargs, random)
        result = function(*args, **kwargs)
        operation: Operation | None = None
        for number, tensor in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
            if isinstance(tensor, Tensor) and is_plain(tensor):
                storage = tensor.untyped_storage()
                if storage.nbytes() >= self._least:
                    operation = operation or self._make_operation(function, trait, args, kwargs, random)
                    self._note(storage, version_of(tensor), operation, number)
        return result

    def find(self, storage: torch.UntypedStorage, version: int) -> Origin:
        """Where the contents of a storage come from."""
        known = self._origins.get(id(storage))
        if known is None or not known.is_of(storage, version):
            known = self._note(storage, version, None)
        return known

    def _write(
        self, function: Any, trait: Trait, args: tuple[Any, ...], kwargs: dict[str, Any], random: _Random | None
    ) -> Any:
        """Carry out an operation that writes into what it is given."""
        given = (args[place] if place < len(args) else kwargs.get(name) for place, name in trait.written)
        written = [tensor for tensor in given if tensor is not None and is_plain(tensor)]
        storages = [tensor.untyped_storage() for tensor in written]
        if not any(storage.nbytes() >= self._least for storage in storages):
            return function(*args, **kwargs)
        operation = self._make_operation(function, trait, args, kwargs, random)
        if operation is not None and any(isinstance(operation.argument(*place), Direct) for place in trait.written):
            operation = None  # memory that stays would be written into once more
        before = [self.find(storage, version_of(tensor)) for tensor, storage in zip(written, storages, strict=True)]
        versions = [version_of(tensor) for tensor in written]
        result = function(*args, **kwargs)
        for storage, version, earlier in zip(storages, versions, before, strict=True):
            self._note(storage, version, operation).write(earlier)
        return result

    def _note(
        self, storage: torch.UntypedStorage, version: int, operation: Operation | None, output: int = 0
    ) -> Origin:
        key = id(storage)
        origin = Origin(storage, version, operation, output, partial(_drop, self._origins, key))
        self._origins[key] = origin
        return origin

    def _make_operation(
        self, function: Any, trait: Trait, args: tuple[Any, ...], kwargs: dict[str, Any], before: _Random | None
    ) -> Operation | None:
        """The operation with no big tensor in it; None where it was given what is no plain memory."""
        given = [self._describe(value) for value in args]
        named = {name: self._describe(value) for name, value in kwargs.items()}
        if trait.has_running and given[5]:  # in training
            given[3] = given[4] = None
        if any(value is _OPAQUE for value in (*given, *named.values())):
            return None
        return Operation(function, tuple(given), named, *(before or ()))

    def _describe(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._describe_tensor(value)
        if isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value):
            each_one = [self._describe(each) for each in value]
            return _OPAQUE if any(one is _OPAQUE for one in each_one) else each_one
        return value

    def _describe_tensor(self, tensor: Tensor) -> Part | Direct | object:
        if not is_plain(tensor):
            return _OPAQUE
        storage = tensor.untyped_storage()
        is_small = storage.nbytes() < self._least
        if is_small or self.stays(tensor, storage):
            leaf = tensor if tensor.is_leaf else base_of(tensor)
            if leaf is not None and leaf.is_leaf:
                return _hold(tensor, leaf, storage)
            if is_small:
                copy = tensor.clone()  # to hold it would hold its graph
                return _hold(copy, copy, copy.untyped_storage())
        origin = self.find(storage, version_of(tensor))
        bits = tensor.is_conj(), tensor.is_neg()
        return Part(origin, tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, bits)


def _find_trait(function: Any) -> Trait | None:
    """What is known of a kind of operation; None for those that are not noted."""
    if not is_operation(function) or function.namespace != "aten" or _name_of(function) in _UNREPEATABLE:
        return None
    schema = function._schema
    if any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns):
        return None  # a view: it makes no memory
    written = [
        (place, argument)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if any("List" in str(argument.type) for _, argument in written):
        return None
    places = tuple((place, argument.name) for place, argument in written)
    return Trait(places, is_random(function), _name_of(function) in _RUNNING)


def _name_of(function: Any) -> str:
    return str(function._schema.name.partition("::")[2])


def _look_at_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Random | None:
    """The state of the generator that an operation is about to draw from; None where it cannot be asked for."""
    if kwargs.get("generator") is not None:
        return None
    device = next((value.device for value in args if isinstance(value, Tensor)), kwargs.get("device"))
    device = torch.device("cpu") if device is None else torch.device(device)
    return (read_random_state(device), device) if can_be_read(device) else None


def _hold(tensor: Tensor, leaf: Tensor, storage: torch.UntypedStorage) -> Direct:
    if tensor is not leaf:
        view = view_storage(storage, tensor, int(tensor.storage_offset()), tensor.size(), tensor.stride())
        tensor = set_bits(view, is_conjugate=tensor.is_conj(), is_negative=tensor.is_neg())
    return Direct(tensor, leaf, version_of(leaf), storage.nbytes())


def _drop(origins: dict[int, Origin], key: int, storage: weakref.ref[torch.UntypedStorage]) -> None:
    known = origins.get(key)
    if known is not None and known.storage is storage:
        del origins[key]
