"""The op log of a forward pass: which operation wrote the contents of memory, and from what, to recompute them.

What an operation was given is not changed once it is noted. Frozen dataclasses would say so, and take a microsecond
more for each operation of a forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from retrograd.core.hooks.dispatch import CarryOut, copy_values, without_graph
from retrograd.core.hooks.engine import grad_enabled, is_in_backward
from retrograd.core.hooks.op_info import OpInfo, can_be_read, find_op_info, find_written, read_random_state
from retrograd.core.hooks.saved import base_of, is_plain, set_bits, version_of
from retrograd.memory.policies.policy import Stays

Bits = tuple[bool, bool]


class RecomputeSource(Protocol):
    """Something packed, from which other memory can be recomputed."""

    @property
    def is_as_it_was(self) -> bool:
        """Whether the program has not written to it."""

    def lend(self, *, is_kept: bool) -> Tensor:
        """Return its values, one-dimensional; they must not be written to.

        Args:
            is_kept: it should keep them, since it is asked for soon.
        """


Forget = Callable[["weakref.ref[torch.UntypedStorage]"], object]


class Contents:
    """The contents of a storage since it was last written to, which are not held, and where they come from.

    Args:
        storage: the storage.
        version: how often it had been written to, as its tensors count.
        operation: what wrote it; None where that was not seen.
        output: which of the operation's results it is.
        forget: called when the storage is gone.

    Attributes:
        storage: the storage, as long as it is there.
        version: how often it had been written to.
        operation: what wrote it.
        output: which of the operation's results it is.
        before: what it was before, where the operation wrote into it; None where the operation made it.
        packed: what a policy made of the whole of it, as long as autograd holds that.
    """

    __slots__ = ("__weakref__", "_is_counted", "before", "operation", "output", "packed", "storage", "version")

    def __init__(
        self, storage: torch.UntypedStorage, version: int, operation: LoggedOp | None, output: int, forget: Forget
    ) -> None:
        self.storage = weakref.ref(storage, forget)
        self.version = version
        self.operation = operation
        self.before: Contents | None = None
        self.output = output
        self.packed: weakref.ref[RecomputeSource] | None = None
        self._is_counted = True

    def write(self, before: Contents) -> None:
        """Record that the operation wrote into this memory. Torch counts the write only after the operation."""
        self.before = before
        self._is_counted = False

    def is_of(self, storage: torch.UntypedStorage, version: int) -> bool:
        """Return whether these are still the contents of a storage."""
        if self.storage() is not storage:
            return False
        if not self._is_counted and version == self.version + 1:
            self.version = version
            self._is_counted = True
        return self.version == version


@dataclass(slots=True, eq=False)
class ViewArgument:
    """A tensor that an operation was given: a part of some memory, which is not held.

    Attributes:
        contents: of the memory.
        size, stride, offset, dtype: of the tensor, in elements.
        bits: whether it is read as conjugate, and as negative.
    """

    contents: Contents
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    bits: Bits

    def place_in(self, storage: torch.UntypedStorage, start: int) -> Tensor:
        """Return the tensor, in other memory with the same contents, which begin at byte ``start`` there."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor = empty.set_(storage, start // self.dtype.itemsize + self.offset, self.size, self.stride)
        conjugate, negative = self.bits
        return set_bits(tensor, is_conjugate=conjugate, is_negative=negative) if conjugate or negative else tensor


@dataclass(slots=True, eq=False)
class HeldArgument:
    """A tensor that an operation was given, and that is held: a parameter, a buffer, or a small one.

    Attributes:
        tensor: it, without its graph.
        leaf: it, or the leaf that it is a view of, which counts writes.
        version: how often it had been written to.
        nbytes: of its storage, which may be taken from it.
    """

    tensor: Tensor
    leaf: Tensor
    version: int
    nbytes: int

    def is_as_it_was(self) -> bool:
        """Return whether the operation would be given the same again."""
        return version_of(self.leaf) == self.version and self.tensor.untyped_storage().nbytes() == self.nbytes


@dataclass(slots=True, eq=False)
class LoggedOp:
    """An operation that was carried out.

    Attributes:
        function: torch's operation.
        args, kwargs: what it was given, with a :class:`ViewArgument` or a :class:`HeldArgument` for each tensor.
        given: all of these.
        number: of the operation in its pass.
        random_state: of the device's generator before it; None where it draws nothing.
        device: of that generator.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: list[ViewArgument | HeldArgument]
    number: int
    random_state: Tensor | None = None
    device: torch.device | None = None

    def argument(self, place: int, name: str) -> Any:
        """The argument at a place, or by name."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name)


_OPAQUE = object()
"""In place of a tensor that is not a plain memory, or of which torch does not count writes."""

_BETWEEN_MARKS = 1 << 20
"""There are fewer operations between two marks."""

_NOTING_SECONDS = 40e-6
"""What each operation takes longer on a CPU while it is looked at, noted or not: 20 ms for the 450 of a ResNet-50.
Python code between two kernels runs with cold caches."""

_Random = tuple[Tensor, torch.device]
"""State of a generator, and its device."""


class OpLog:
    """Records the operations of a pass while that is of use, and finds out what made a storage range.

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
        self._seen = 0
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
        """Record that the first range is packed; returns whether operations are noted."""
        if not self._has_begun:  # a forward that did not begin with a call
            self.clear()
        self._has_begun = False
        return self._is_on

    def ask_for_another(self, was_on: bool) -> bool:
        """Return whether a plan has to wait for another pass like the last one, since that one was not recorded."""
        self._is_asked_for = self._is_allowed and not was_on and not self._is_asked_for
        return self._is_asked_for

    def clear(self) -> None:
        """Forget all: another pass begins, of which all is wanted."""
        self._contents.clear()
        self._count = -1
        self._seen = 0
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
        self._seen += 1
        is_in_forward = not is_in_backward()
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

    @property
    def noting_seconds(self) -> float:
        """The time of a CPU that it takes to look at the operations of a pass like this one."""
        return self._seen * _NOTING_SECONDS

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
        """Record what an operation has made."""
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
