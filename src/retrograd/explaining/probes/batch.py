"""A batch as the arguments of a model, and batches like it in which other things stand at some places."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core.errors import ProbeError
from retrograd.core.hooks.names import spread_batch
from retrograd.core.hooks.nested import Keys, flatten, replace_tensors
from retrograd.core.hooks.torch_calls import describe_tensor


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> Iterator[tuple[Keys, Tensor]]:
        """All tensors, with the keys that lead to them."""
        yield from flatten((self.args, self.kwargs), ())

    def replace(self, tensors: Mapping[Keys, Tensor]) -> Arguments:
        """Make the same arguments with other tensors in some places."""
        args, kwargs = replace_tensors((self.args, self.kwargs), (), tensors)
        return Arguments(args, kwargs)

    def describe(self) -> str:
        """``float32[8, 3], mask=bool[8]``."""
        given = [*(("", each) for each in self.args), *((f"{name}=", each) for name, each in self.kwargs.items())]
        return ", ".join(f"{name}{_describe(each)}" for name, each in given)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return describe_tensor(value)
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def read_batch(model: nn.Module, batch: Any) -> Arguments:
    """Choose what of a batch the model is called with.

    A tuple or list holds arguments in order, and those are left out that ``forward`` has no place for, as are targets
    of a data loader. A mapping holds arguments by name; where ``forward`` takes none of the names and has one
    argument, the mapping itself is that. Anything else is the only argument.
    """
    args, kwargs = spread_batch(batch)
    places = _places_of(model)
    if places is None:
        return Arguments(args, kwargs)
    kinds = [each.kind for each in places]
    by_place = [each for each in places if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        args = args[: len(by_place)]
    if kwargs and inspect.Parameter.VAR_KEYWORD not in kinds:
        known = {name: each for name, each in kwargs.items() if name in {place.name for place in places}}
        return Arguments((batch,), {}) if not known and len(by_place) == 1 else Arguments((), known)
    return Arguments(args, kwargs)


def _places_of(model: nn.Module) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):  # a forward written in C tells nothing
        return None


class Axis:
    """A dimension of what a model is called with, along which it is probed.

    Args:
        arguments: of the model.
        dim: the dimension.
        what: runs along it, in messages: ``samples``.

    Attributes:
        size: of that dimension.
        tensors: those that have it, by their keys.

    Raises:
        ProbeError: there is no such tensor, or nothing to compare.
    """

    def __init__(self, arguments: Arguments, dim: int, what: str) -> None:
        self.arguments, self.dim, self.what = arguments, dim, what
        found = {keys: each for keys, each in arguments.tensors() if each.dim() > dim and not each.is_sparse}
        if not found:
            raise ProbeError(
                f"The model would be called with ({arguments.describe()}): no tensor there has dimension {dim}.",
                repair="give a batch of tensors: a tensor, a tuple of arguments, or a dict of named ones.",
                reason=f"other {what} are put into a tensor to see which outputs change.",
            )
        self.size = Counter(each.size(dim) for each in found.values()).most_common(1)[0][0]
        self.tensors = {keys: each for keys, each in found.items() if self._has(each)}
        if self.size < 2:
            raise ProbeError(
                f"The model would be called with ({arguments.describe()}): dimension {dim} has size {self.size}.",
                repair=f"give at least two {what}.",
                reason=f"nothing can be seen of one among {what} that are not there.",
            )

    def _has(self, tensor: Tensor) -> bool:
        """Return whether it runs along this dimension, and is neither a square mask nor the numbers of places."""
        if tensor.size(self.dim) != self.size:
            return False
        if tuple(tensor.shape) == (self.size, self.size):
            return not bool((tensor.isinf() | (tensor == 0) | (tensor == 1)).all())
        is_count = tensor.dim() == 1 and not tensor.is_floating_point()
        return not (is_count and torch.equal(tensor.cpu().long(), torch.arange(self.size)))

    def take(self, places: Tensor) -> Arguments:
        """Make the arguments with what stands at ``places``, int64 [size], in place of 0, 1, 2 …"""
        return self.arguments.replace(
            {keys: each.index_select(self.dim, places.to(each.device)) for keys, each in self.tensors.items()}
        )

    def count_sequences(self) -> int:
        """Count the tensors that hold something of their own at each place: ids, or vectors; no masks, no targets."""
        found: list[Tensor] = []
        for each in self.tensors.values():
            is_dense = each.dim() > self.dim + 1 if each.is_floating_point() else each.dim() == self.dim + 1
            values = each.detach().reshape(-1)[:_SEEN]
            is_known = any(_is_shifted(each, other, self.dim) for other in found)
            is_counted = not each.is_floating_point() and bool((each == each[:1]).all()) and each.size(0) > 1
            if is_dense and len(values.unique()) > 2 and not is_known and not is_counted:
                found.append(each)
        return len(found)

    def find_other(self, place: int) -> int | None:
        """Find a place at which something else stands than at this one; None where all are the same."""
        for other in (each % self.size for each in range(place + 1, place + self.size)):
            if any(
                _differ(each.select(self.dim, place), each.select(self.dim, other)) for each in self.tensors.values()
            ):
                return other
        return None


_SEEN = 1 << 16


def _is_shifted(one: Tensor, other: Tensor, dim: int) -> bool:
    """Return whether a tensor is another, at the same places or one on, where it is not negative."""
    if one.shape != other.shape or one.is_floating_point() or other.is_floating_point():
        return False
    size = one.size(dim)
    return any(
        bool(((a := one.narrow(dim, 0, size - by)) == other.narrow(dim, by, size - by))[a >= 0].all()) for by in (0, 1)
    )


def _differ(one: Tensor, other: Tensor) -> bool:
    return not torch.equal(one.nan_to_num(), other.nan_to_num())
