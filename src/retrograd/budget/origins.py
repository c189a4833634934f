"""Where the contents of memory come from: the operation that wrote them last, and what that was given.

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


class Lender(Protocol):
    """Something packed, of which other memory can be made."""

    @property
    def is_as_it_was(self) -> bool:
        """Whether the program has not written to it."""

    def lend(self, *, is_kept: bool) -> Tensor:
        """Its values, one-dimensional; they must not be written to.

        Args:
            is_kept: it should keep them, since it is asked for soon.
        """


Forget = Callable[["weakref.ref[torch.UntypedStorage]"], object]


class Origin:
    """The contents of a storage since it was last written to. It does not hold them.

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
        self, storage: torch.UntypedStorage, version: int, operation: Operation | None, output: int, forget: Forget
    ) -> None:
        self.storage = weakref.ref(storage, forget)
        self.version = version
        self.operation = operation
        self.before: Origin | None = None
        self.output = output
        self.packed: weakref.ref[Lender] | None = None
        self._is_counted = True

    def write(self, before: Origin) -> None:
        """The operation wrote into this memory. Torch counts the write only when the operation has ended."""
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
class Part:
    """A tensor that an operation was given: a part of some memory, which is not held.

    Attributes:
        origin: the contents of the memory.
        size, stride, offset, dtype: of the tensor, in elements.
        bits: whether it is read as conjugate, and as negative.
    """

    origin: Origin
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    bits: Bits

    def place_in(self, storage: torch.UntypedStorage, start: int) -> Tensor:
        """The tensor, in other memory with the same contents, which begin at byte ``start`` there."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor = empty.set_(storage, start // self.dtype.itemsize + self.offset, self.size, self.stride)
        conjugate, negative = self.bits
        return set_bits(tensor, is_conjugate=conjugate, is_negative=negative) if conjugate or negative else tensor


@dataclass(slots=True, eq=False)
class Direct:
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
class Operation:
    """An operation that was carried out.

    Attributes:
        function: torch's operation.
        args, kwargs: what it was given, with a :class:`Part` or a :class:`Direct` for each tensor.
        given: all of these parts and tensors.
        number: of the operation in its pass.
        random_state: of the device's generator before it; None where it draws nothing.
        device: of that generator.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: list[Part | Direct]
    number: int
    random_state: Tensor | None = None
    device: torch.device | None = None

    def argument(self, place: int, name: str) -> Any:
        """What it was given at a place, or by name."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name)
