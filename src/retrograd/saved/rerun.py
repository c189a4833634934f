"""Make memory again: run the operations that made it, on what they were given."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from retrograd.errors import OverwrittenError
from retrograd.hooks.dispatch import below_autograd
from retrograd.hooks.saved import view_storage
from retrograd.saved.origins import Direct, Lender, Operation, Origin, Part
from retrograd.saved.random_state import draw_again

_MOST_OPERATIONS = 64
"""More are not run again for one stretch of memory."""
_BLANK = frozenset({
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted",
    "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full",
})  # fmt: skip
"""Memory that is there to be filled. If no operation does it, numpy may: in the measured pass perhaps with zeros."""


class Rerun:
    """How a piece of memory is made again. It holds none.

    Args:
        origin: its contents.
        sources: what is packed of what it is made from.
        operations: what is run, in order.
        is_held: whether the sources are held by it; otherwise it works as long as autograd holds them.
    """

    __slots__ = ("_held", "_origin", "_sources", "operations")

    def __init__(
        self, origin: Origin, sources: Mapping[Origin, Lender], operations: list[Operation], is_held: bool
    ) -> None:
        self._origin = origin
        self._sources = {id(each): weakref.ref(lender) for each, lender in sources.items()}
        self._held = tuple(sources.values()) if is_held else ()
        self.operations = operations

    @property
    def sources(self) -> list[Lender | None]:
        """What it is made from; None for what has gone."""
        return [source() for source in self._sources.values()]

    @property
    def is_possible(self) -> bool:
        """Whether the same operations would be given the same again."""
        direct = (given for operation in self.operations for given in operation.given() if isinstance(given, Direct))
        has_sources = all(source is not None and source.is_as_it_was for source in self.sources)
        return has_sources and all(given.is_as_it_was() for given in direct)

    def run(self) -> tuple[torch.UntypedStorage, int]:
        """Make it.

        Returns:
            Memory that nobody else has, and how many bytes were made beside it.

        Raises:
            OverwrittenError: what an operation is given is no longer what it was.
        """
        if not self.is_possible:
            raise OverwrittenError(
                f"What {self} was given has been written to since, so that it cannot be run again.",
                repair="write into parameters and buffers after the backward pass, or give Planned(rerun=False).",
                reason="a budget was kept by dropping a saved tensor that was to be computed again.",
            )
        with below_autograd(), torch.enable_grad():  # some operations ask; only those of a graph were noted
            run = _Run({key: source() for key, source in self._sources.items()}, bool(self._held))
            storage = run.make(self._origin)
        return storage, run.made_bytes - storage.nbytes()

    def __str__(self) -> str:
        names = (_name_of(operation) for operation in self.operations)
        words = (name.removeprefix("native_").removeprefix("_").rstrip("_") for name in names if name not in _BLANK)
        return ", ".join(dict.fromkeys(words))


def find_rerun(origin: Origin, *, is_held: bool) -> Rerun | None:
    """How contents could be made again from what is packed now; None where they cannot."""
    sources: dict[Origin, Lender] = {}
    operations: list[Operation] = []
    if _is_blank(origin) or not _collect(origin, sources, operations, 0):
        return None
    return Rerun(origin, sources, operations, is_held)


def _collect(origin: Origin, sources: dict[Origin, Lender], operations: list[Operation], depth: int) -> bool:
    """Gather what contents are made by and from, but stop at what is packed."""
    operation = origin.operation
    if operation is None or depth > _MOST_OPERATIONS:
        return False
    if operation in operations and origin.before is None:
        return True
    for given in operation.given():
        if not isinstance(given, Part) or given.origin in sources:
            continue
        lender = None if given.origin.packed is None else given.origin.packed()
        if lender is not None:
            sources[given.origin] = lender
        elif (_is_blank(given.origin) and given.origin is not origin.before) or not _collect(
            given.origin, sources, operations, depth + 1
        ):
            return False
    operations.append(operation)
    return len(operations) <= _MOST_OPERATIONS


def _is_blank(origin: Origin) -> bool:
    return origin.operation is not None and _name_of(origin.operation) in _BLANK


def _name_of(operation: Operation) -> str:
    return str(operation.function._schema.name.partition("::")[2])


class _Run:
    """One time of making something again.

    Attributes:
        made_bytes: of all memory that was made.
    """

    def __init__(self, sources: Mapping[int, Lender | None], is_kept: bool) -> None:
        self._sources = sources
        self._is_kept = is_kept
        self._read: dict[int, Tensor] = {}
        self.made_bytes = 0

    def make(self, origin: Origin) -> torch.UntypedStorage:
        """Memory with these contents that nobody else has."""
        operation = origin.operation
        assert operation is not None
        if origin.before is None:
            result = self._carry_out(operation, {})
            outputs = result if isinstance(result, (tuple, list)) else (result,)
            storages = [tensor.untyped_storage() for tensor in outputs if isinstance(tensor, Tensor)]
            self.made_bytes += sum({storage._cdata: storage.nbytes() for storage in storages}.values())
            made = outputs[origin.output]
            if not isinstance(made, Tensor):
                raise RuntimeError(f"{operation.function} has not made a tensor again that it made before")
            return made.untyped_storage()
        own = self._own(origin.before)
        self._carry_out(operation, {id(origin.before): own})
        return own.untyped_storage()

    def _own(self, origin: Origin) -> Tensor:
        """A copy of contents that may be written into."""
        if id(origin) not in self._sources:
            return _bytes_of(self.make(origin))
        copy = self._values(origin).clone()
        self.made_bytes += copy.nbytes
        return copy

    def _values(self, origin: Origin) -> Tensor:
        """Contents that are only read."""
        values = self._read.get(id(origin))
        if values is None:
            source = self._sources.get(id(origin))
            values = self._read[id(origin)] = (
                _bytes_of(self.make(origin)) if source is None else source.lend(is_kept=self._is_kept)
            )
        return values

    def _carry_out(self, operation: Operation, written: Mapping[int, Tensor]) -> Any:
        args = [self._fill(value, written) for value in operation.args]
        kwargs = {name: self._fill(value, written) for name, value in operation.kwargs.items()}
        state, device = operation.random_state, operation.device
        if state is None or device is None:
            return operation.function(*args, **kwargs)
        with draw_again(operation.function, args, kwargs, state, device):
            return operation.function(*args, **kwargs)

    def _fill(self, value: Any, written: Mapping[int, Tensor]) -> Any:
        if isinstance(value, Part):
            own = written.get(id(value.origin))
            return value.place_in(self._values(value.origin) if own is None else own)
        if isinstance(value, Direct):
            return value.tensor
        return [self._fill(each, written) for each in value] if isinstance(value, list) else value


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    like = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view_storage(storage, like, 0, (storage.nbytes(),), (1,))
