"""Contents of memory: the operation that wrote them last, and what that was given.

What an operation was given is not changed once it is noted. Frozen dataclasses would say so, and take a microsecond
more for each operation of a forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from retrograd.hooks.saved import set_bits, version_of

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
        """Note that the operation wrote into this memory. Torch counts the write only when the operation has ended."""
        self.before = before
        self._is_counted = False

    def is_of(self, storage: torch.UntypedStorage, version: int) -> bool:
        """Whether these are the contents of a storage still."""
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
        """Whether the operation would be given the same again."""
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
