"""The op log of a forward pass: what made the contents of memory, so that they can be recomputed."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor

from retrograd.budget.contents import Contents, HeldArgument, LoggedOp, ViewArgument
from retrograd.hooks.engine import current_graph_task, grad_enabled
from retrograd.hooks.op_info import OpInfo, can_be_read, find_op_info, find_written, read_random_state
from retrograd.hooks.operation_tap import CarryOut, copy_values, without_graph
from retrograd.hooks.saved import base_of, is_plain, version_of
from retrograd.policies.policy import Stays

_OPAQUE = object()
"""In place of a tensor that is not a plain memory, or of which torch does not count writes."""

_BETWEEN_MARKS = 1 << 20
"""There are fewer operations between two marks."""

_Random = tuple[Tensor, torch.device]
"""State of a generator, and its device."""


class OpLog:
    """Notes the operations of a pass while that is of use, and finds out what made a storage range.

    What is not wanted is still looked at for what it writes to, so that nothing false is known of any memory whatever
    is wanted: there is only less of which it is known how it was made.

    Args:
        least: bytes below which memory is held instead, by the operations that are given it. No smaller range is
            recomputed.
        is_allowed: whether any is.

    Attributes:
        wanted: numbers of the operations to note; None for all. Those before the first mark all have the number −1, and
            are always wanted.
    """

    def __init__(self, least: int, *, is_allowed: bool = True) -> None:
        self._stays: Stays = lambda tensor, storage: False
        self.wanted: frozenset[int] | None = None
        self._least = least
        self._is_allowed = is_allowed
        self._is_on = False
        self._has_begun = False
        self._is_asked_for = False
        self._count = -1
        self._contents: dict[int, Contents] = {}
        self._infos: dict[int, OpInfo] = {}  # by id, since torch hashes operations in Python

    def begin_forward(self, stays: Stays, *, is_of_use: bool, is_new: bool) -> CarryOut | None:
        """Begin to note, if there is reason to; returns what is to see the operations from now on.

        Args:
            stays: whether a tensor lies in memory that stays anyway.
            is_of_use: there is a plan to be made, or one that has some of them recomputed.
            is_new: nothing of the pass has been packed.
        """
        self._is_on = self._is_allowed and (is_of_use or self._is_asked_for)
        if not self._is_on:
            return None
        if is_new:
            self.clear()
            self._has_begun = True
        self._stays = stays
        return self.carry_out

    def begin_pass(self) -> bool:
        """Note that the first range is packed; returns whether operations are noted."""
        if not self._has_begun:  # a forward that did not begin with a call
            self.clear()
        self._has_begun = False
        return self._is_on

    def ask_for_another(self, was_on: bool) -> bool:
        """Whether a plan has to wait for another pass like the one that has ended, since that one was not noted."""
        self._is_asked_for = self._is_allowed and not was_on and not self._is_asked_for
        return self._is_asked_for

    def clear(self) -> None:
        """Forget all: another pass begins, of which all is wanted."""
        self._contents.clear()
        self._count = -1
        self.wanted = None

    def mark(self, number: int, wanted: frozenset[int] | None = None) -> None:
        """Number operations anew from here on: every such pass comes to this place.

        What is carried out in one pass alone, such as by a compiler, shifts numbers no further than to the next mark.

        Args:
            number: of the mark.
            wanted: numbers of the operations to note from here on.
        """
        self._count = number * _BETWEEN_MARKS
        self.wanted = wanted

    def carry_out(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out an operation, and note it.

        Where no graph is made nothing is noted: compiled code, and kernels inside of custom Functions, write into the
        memory that operations have made, and nobody tells.
        """
        info = self._infos.get(id(function)) or self._learn(function)
        is_in_forward = current_graph_task() == -1
        number = self._count
        if is_in_forward and number >= 0:
            self._count = number + 1
        if (
            not info.is_noted
            or (self.wanted is not None and number >= 0 and number not in self.wanted)
            or not is_in_forward
            or not grad_enabled()
        ):
            if info.written:
                self._forget(info, args, kwargs)
            return info.entry(*args, **kwargs)
        if info.written:
            return self._write(info, args, kwargs, number)
        random = _look_at_generator(args, kwargs) if info.is_random else None
        result = info.entry(*args, **kwargs)
        if random is not None or not info.is_random:
            self._note_results(result, info, args, kwargs, number, random)
        return result

    def find(self, storage: torch.UntypedStorage, version: int) -> Contents:
        """Find out where the contents of a storage come from."""
        known = self._contents.get(id(storage))
        if known is None or not known.is_of(storage, version):
            known = self._note(storage, version, None)
        return known

    def _learn(self, function: Any) -> OpInfo:
        info = self._infos[id(function)] = find_op_info(function)
        return info

    def _note_results(
        self,
        result: Any,
        info: OpInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        number: int,
        random: _Random | None,
    ) -> None:
        """Note what an operation has made."""
        operation: LoggedOp | None = None
        for output, tensor in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
            if isinstance(tensor, Tensor) and tensor.numel() * tensor.itemsize >= self._least and is_plain(tensor):
                operation = operation or self._make_operation(info, args, kwargs, number, random)
                self._note(tensor.untyped_storage(), version_of(tensor), operation, output)

    def _write(self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> Any:
        """Carry out an operation that writes into what it is given."""
        written = find_written(info, args, kwargs)
        storages = [tensor.untyped_storage() for tensor in written if is_plain(tensor)]
        if len(storages) < len(written) or not any(storage.nbytes() >= self._least for storage in storages):
            self._forget(info, args, kwargs)
            return info.entry(*args, **kwargs)
        random = _look_at_generator(args, kwargs) if info.is_random else None
        operation = None
        if len({id(storage) for storage in storages}) == 1 and (random is not None or not info.is_random):
            operation = self._make_operation(info, args, kwargs, number, random)
        if operation is not None and any(
            isinstance(operation.argument(*place), HeldArgument) for place in info.written
        ):
            operation = None  # memory that stays would be written into once more
        before = [self.find(storage, version_of(tensor)) for tensor, storage in zip(written, storages, strict=True)]
        versions = [version_of(tensor) for tensor in written]
        result = info.entry(*args, **kwargs)
        for storage, version, earlier in zip(storages, versions, before, strict=True):
            self._note(storage, version, operation).write(earlier)
        return result

    def _forget(self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forget what is about to be written to; torch need not count that."""
        for tensor in find_written(info, args, kwargs):
            if not is_plain(tensor):  # nobody knows in which memory it lies
                self._contents.clear()
                return
            self._contents.pop(id(tensor.untyped_storage()), None)

    def _note(
        self, storage: torch.UntypedStorage, version: int, operation: LoggedOp | None, output: int = 0
    ) -> Contents:
        key = id(storage)
        contents = Contents(storage, version, operation, output, partial(_drop, self._contents, key))
        self._contents[key] = contents
        return contents

    def _make_operation(
        self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, before: _Random | None
    ) -> LoggedOp | None:
        """Describe an operation with no big tensor in it; None where it was given what is not a plain memory."""
        values = list(args)
        if info.has_running and values[5]:  # in training
            values[3] = values[4] = None
        given: list[ViewArgument | HeldArgument] = []
        for place in info.tensors:
            if place < len(values):
                values[place] = self._describe(values[place], given)
                if values[place] is _OPAQUE:
                    return None
        named = {name: self._describe(value, given) for name, value in kwargs.items()} if kwargs else {}
        if any(value is _OPAQUE for value in named.values()):
            return None
        return LoggedOp(info.function, tuple(values), named, given, number, *(before or ()))

    def _describe(self, value: Any, given: list[ViewArgument | HeldArgument]) -> Any:
        """Return what stands for a value; for a tensor, it is added to what is ``given``."""
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

    def _describe_tensor(self, tensor: Tensor) -> ViewArgument | HeldArgument:
        storage = tensor.untyped_storage()
        is_small = storage.nbytes() < self._least
        leaf = tensor if tensor.is_leaf else base_of(tensor)
        if leaf is not None and leaf.is_leaf and (is_small or self._stays(tensor, storage)):
            return HeldArgument(without_graph(tensor), leaf, version_of(leaf), storage.nbytes())
        if is_small:
            copy = copy_values(tensor)  # to hold it would hold its graph
            return HeldArgument(copy, copy, version_of(copy), copy.untyped_storage().nbytes())
        contents = self.find(storage, version_of(tensor))
        bits = tensor.is_conj(), tensor.is_neg()
        return ViewArgument(contents, tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, bits)


def _look_at_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Random | None:
    """The state of the generator that an operation is about to draw from; None where it cannot be asked for."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator):
            return (value.get_state(), value.device) if can_be_read(value.device) else None
    device = next((value.device for value in args if isinstance(value, Tensor)), kwargs.get("device"))
    device = torch.device("cpu") if device is None else torch.device(device)
    return (read_random_state(device), device) if can_be_read(device) else None


def _drop(contents: dict[int, Contents], key: int, storage: weakref.ref[torch.UntypedStorage]) -> None:
    known = contents.get(key)
    if known is not None and known.storage is storage:
        del contents[key]
