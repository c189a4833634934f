"""Recompute the contents of memory: run the operations that made them, on what they were given."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from retrograd.core.errors import OverwrittenError
from retrograd.core.hooks.dispatch import below_autograd
from retrograd.core.hooks.op_info import draw_again, name_of_operation, shorten_name
from retrograd.memory.budget.op_log import Contents, HeldArgument, LoggedOp, RecomputeSource, ViewArgument

_MOST_OPERATIONS = 64
"""More are not run for one storage range."""
_PATTERN = 0xA5
"""A byte that is neither zero nor likely to be left over in memory."""
_Memory = tuple[torch.UntypedStorage, int]
"""Memory, and at which byte of it they begin."""

_BLANK = frozenset({
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted",
    "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full",
})  # fmt: skip
"""Memory that is there to be filled. If no operation does it, numpy may: in the measured pass perhaps with zeros."""


class Recipe:
    """The operations by which the contents of a piece of memory are recomputed. It holds no memory.

    Args:
        contents: of the memory.
        sources: what is packed of what they are computed from.
        operations: what is run, in order.
        is_held: whether the sources are held by it; otherwise it works as long as autograd holds them.
    """

    __slots__ = ("_contents", "_held", "_sources", "operations")

    def __init__(
        self, contents: Contents, sources: Mapping[Contents, RecomputeSource], operations: list[LoggedOp], is_held: bool
    ) -> None:
        self._contents = contents
        self._sources = {id(each): weakref.ref(source) for each, source in sources.items()}
        self._held = tuple(sources.values()) if is_held else ()
        self.operations = operations

    @property
    def sources(self) -> list[RecomputeSource | None]:
        """The packed memory that it starts from; None for what has gone."""
        return [source() for source in self._sources.values()]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the operations of the pass that are run, in order."""
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
                if type(given) is HeldArgument and not given.is_as_it_was():
                    return False
        return True

    def run(self, *, is_trial: bool = False) -> tuple[torch.UntypedStorage, int]:
        """Recompute it.

        Args:
            is_trial: memory that no operation has filled yet is given a pattern, so that it shows if none does.

        Returns:
            Memory that nobody else has, and how many bytes were allocated beside it.

        Raises:
            OverwrittenError: what an operation is given is no longer what it was.
        """
        if not self.is_possible:
            raise OverwrittenError(
                f"What {self} was given has been written to since, so that it cannot be recomputed.",
                repair="write into parameters and buffers after the backward pass, or give Planned(recompute=False).",
                reason="a budget was kept by dropping a saved tensor that was to be recomputed.",
            )
        with below_autograd(), torch.enable_grad():  # some operations ask; only those of a graph were noted
            run = _RecipeRun({key: source() for key, source in self._sources.items()}, bool(self._held), is_trial)
            storage = run.make(self._contents)
        return storage, run.made_bytes - storage.nbytes()

    def __str__(self) -> str:
        names = (name_of_operation(operation.function) for operation in self.operations)
        return ", ".join(dict.fromkeys(shorten_name(name) for name in names if name not in _BLANK))


def find_recipe(contents: Contents, *, is_held: bool) -> Recipe | None:
    """Find out how contents can be recomputed from what is packed now; None where they cannot."""
    sources: dict[Contents, RecomputeSource] = {}
    operations: list[LoggedOp] = []
    if _is_blank(contents) or not _collect(contents, sources, operations, 0):
        return None
    return Recipe(contents, sources, operations, is_held)


def _collect(
    contents: Contents, sources: dict[Contents, RecomputeSource], operations: list[LoggedOp], depth: int
) -> bool:
    """Gather the operations that contents come from, back to what is packed; False where that cannot be."""
    operation = contents.operation
    if operation is None or depth > _MOST_OPERATIONS:
        return False
    if operation in operations and contents.before is None:
        return True
    before = contents.before
    if before is not None and not any(
        type(given) is ViewArgument and given.contents is before for given in operation.given
    ):
        return False  # written to through two tensors that count by themselves (``data``)
    for given in operation.given:
        if type(given) is not ViewArgument or given.contents in sources:
            continue
        source = None if given.contents.packed is None else given.contents.packed()
        if source is not None:
            sources[given.contents] = source
        elif (_is_blank(given.contents) and given.contents is not contents.before) or not _collect(
            given.contents, sources, operations, depth + 1
        ):
            return False
    operations.append(operation)
    return len(operations) <= _MOST_OPERATIONS


def _is_blank(contents: Contents) -> bool:
    return contents.operation is not None and name_of_operation(contents.operation.function) in _BLANK


class _RecipeRun:
    """Contents that are being recomputed.

    Attributes:
        made_bytes: of all memory that was allocated.
    """

    def __init__(self, sources: Mapping[int, RecomputeSource | None], is_kept: bool, is_trial: bool) -> None:
        self._is_trial = is_trial
        self._sources = sources
        self._is_kept = is_kept
        self._lent: list[Tensor] = []
        self._read: dict[int, _Memory] = {}
        self.made_bytes = 0

    def make(self, contents: Contents) -> torch.UntypedStorage:
        """Compute memory with these contents that nobody else has."""
        operation = contents.operation
        assert operation is not None
        if contents.before is not None:
            own = self._own(contents.before)
            self._carry_out(operation, id(contents.before), own)
            return own
        result = self._carry_out(operation)
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        storages = [tensor.untyped_storage() for tensor in outputs if isinstance(tensor, Tensor)]
        self.made_bytes += sum({id(storage): storage.nbytes() for storage in storages}.values())
        made = outputs[contents.output]
        if isinstance(made, Tensor):
            storage = made.untyped_storage()
            if self._is_trial and "empty" in name_of_operation(operation.function):
                made.new_empty(0, dtype=torch.uint8).set_(storage).fill_(_PATTERN)
            return storage
        raise RuntimeError(f"{operation.function} has not returned a tensor where it did before")

    def _own(self, contents: Contents) -> torch.UntypedStorage:
        """Copy contents, to write into them."""
        source = self._sources.get(id(contents))
        if source is None:
            return self.make(contents)
        copy = self._lend(source).clone()
        self.made_bytes += copy.nbytes
        return copy.untyped_storage()

    def _find(self, contents: Contents) -> _Memory:
        """Find contents that are only read."""
        found = self._read.get(id(contents))
        if found is None:
            source = self._sources.get(id(contents))
            if source is None:
                found = self.make(contents), 0
            else:
                values = self._lend(source)
                found = values.untyped_storage(), int(values.storage_offset()) * values.itemsize
            self._read[id(contents)] = found
        return found

    def _lend(self, source: RecomputeSource) -> Tensor:
        values = source.lend(is_kept=self._is_kept)
        self._lent.append(values)  # as long as this runs
        return values

    def _carry_out(self, operation: LoggedOp, written: int = 0, own: torch.UntypedStorage | None = None) -> Any:
        """Run an operation; where it was given the contents with the id ``written``, it writes into ``own``."""
        args = [self._fill(value, written, own) for value in operation.args]
        kwargs = {name: self._fill(value, written, own) for name, value in operation.kwargs.items()}
        state, device = operation.random_state, operation.device
        if state is None or device is None:
            return operation.function(*args, **kwargs)
        with draw_again(operation.function, args, kwargs, state, device):
            return operation.function(*args, **kwargs)

    def _fill(self, value: Any, written: int, own: torch.UntypedStorage | None) -> Any:
        if type(value) is ViewArgument:
            if own is not None and id(value.contents) == written:
                return value.place_in(own, 0)
            return value.place_in(*self._find(value.contents))
        if type(value) is HeldArgument:
            return value.tensor
        return [self._fill(each, written, own) for each in value] if type(value) is list else value
