"""Make memory again: run the operations that made it, on what they were given."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from retrograd.budget.origins import Direct, Lender, Operation, Origin, Part
from retrograd.budget.random_state import draw_again
from retrograd.errors import OverwrittenError
from retrograd.hooks.dispatch import below_autograd

_MOST_OPERATIONS = 64
"""More are not run again for one stretch of memory."""
_PATTERN = 0xA5
"""A byte that is neither zero nor likely to be left over in memory."""
_Contents = tuple[torch.UntypedStorage, int]
"""Memory, and at which byte of it they begin."""

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
    def numbers(self) -> tuple[int, ...]:
        """Which operations of the pass are run, in order."""
        return tuple(operation.number for operation in self.operations)

    @property
    def is_possible(self) -> bool:
        """Whether the same operations would be given the same again."""
        for reference in self._sources.values():
            source = reference()
            if source is None or not source.is_as_it_was:
                return False
        for operation in self.operations:
            for given in operation.given:
                if type(given) is Direct and not given.is_as_it_was():
                    return False
        return True

    def run(self, *, is_trial: bool = False) -> tuple[torch.UntypedStorage, int]:
        """Make it.

        Args:
            is_trial: memory that no operation has filled yet is given a pattern, so that it shows if none does.

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
            run = _Run({key: source() for key, source in self._sources.items()}, bool(self._held), is_trial)
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
    before = origin.before
    if before is not None and not any(type(given) is Part and given.origin is before for given in operation.given):
        return False  # written to through two tensors that count by themselves (``data``)
    for given in operation.given:
        if type(given) is not Part or given.origin in sources:
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

    def __init__(self, sources: Mapping[int, Lender | None], is_kept: bool, is_trial: bool) -> None:
        self._is_trial = is_trial
        self._sources = sources
        self._is_kept = is_kept
        self._lent: list[Tensor] = []
        self._read: dict[int, _Contents] = {}
        self.made_bytes = 0

    def make(self, origin: Origin) -> torch.UntypedStorage:
        """Memory with these contents that nobody else has."""
        operation = origin.operation
        assert operation is not None
        if origin.before is not None:
            own = self._own(origin.before)
            self._carry_out(operation, id(origin.before), own)
            return own
        result = self._carry_out(operation)
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        storages = [tensor.untyped_storage() for tensor in outputs if isinstance(tensor, Tensor)]
        self.made_bytes += sum({id(storage): storage.nbytes() for storage in storages}.values())
        made = outputs[origin.output]
        if isinstance(made, Tensor):
            storage = made.untyped_storage()
            if self._is_trial and "empty" in _name_of(operation):
                made.new_empty(0, dtype=torch.uint8).set_(storage).fill_(_PATTERN)
            return storage
        raise RuntimeError(f"{operation.function} has not made a tensor again that it made before")

    def _own(self, origin: Origin) -> torch.UntypedStorage:
        """A copy of contents that may be written into."""
        source = self._sources.get(id(origin))
        if source is None:
            return self.make(origin)
        copy = self._lend(source).clone()
        self.made_bytes += copy.nbytes
        return copy.untyped_storage()

    def _find(self, origin: Origin) -> _Contents:
        """Contents that are only read."""
        found = self._read.get(id(origin))
        if found is None:
            source = self._sources.get(id(origin))
            if source is None:
                found = self.make(origin), 0
            else:
                values = self._lend(source)
                found = values.untyped_storage(), int(values.storage_offset()) * values.itemsize
            self._read[id(origin)] = found
        return found

    def _lend(self, source: Lender) -> Tensor:
        values = source.lend(is_kept=self._is_kept)
        self._lent.append(values)  # as long as this runs
        return values

    def _carry_out(self, operation: Operation, written: int = 0, own: torch.UntypedStorage | None = None) -> Any:
        """Run an operation; where it is given the origin with the id ``written``, it writes into ``own``."""
        args = [self._fill(value, written, own) for value in operation.args]
        kwargs = {name: self._fill(value, written, own) for name, value in operation.kwargs.items()}
        state, device = operation.random_state, operation.device
        if state is None or device is None:
            return operation.function(*args, **kwargs)
        with draw_again(operation.function, args, kwargs, state, device):
            return operation.function(*args, **kwargs)

    def _fill(self, value: Any, written: int, own: torch.UntypedStorage | None) -> Any:
        if type(value) is Part:
            if own is not None and id(value.origin) == written:
                return value.place_in(own, 0)
            return value.place_in(*self._find(value.origin))
        if type(value) is Direct:
            return value.tensor
        return [self._fill(each, written, own) for each in value] if type(value) is list else value
