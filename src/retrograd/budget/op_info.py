"""What is known of each kind of operation before it is carried out: what it writes to, and whether it is repeatable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from retrograd.hooks.dispatch import entry_of, is_operation, is_random

_UNREPEATABLE = frozenset({
    "set_", "resize_", "resize_as_", "bincount", "histc", "index_add", "index_add_", "index_copy", "index_copy_",
    "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put", "index_reduce", "index_reduce_", "put", "put_",
    "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "segment_reduce",
    "_cudnn_rnn", "miopen_rnn", "batch_norm_update_stats", "batch_norm_gather_stats",
    "batch_norm_gather_stats_with_counts", "cumsum", "cumsum_", "median",
})  # fmt: skip
"""They take memory from elsewhere; or write or add up in an order that is not the same twice on every device; or write
into a state without saying so."""

_VIEWS = frozenset({"_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "lift"})
"""What they return lies in what they are given, though their schema does not say so."""

_RUNNING = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
"""They write into running statistics without saying so. While training they do not read them."""


@dataclass(frozen=True, slots=True)
class Trait:
    """What is known of a kind of operation.

    Attributes:
        function: the operation.
        entry: carries it out.
        is_noted: it makes or fills memory, and would do the same again.
        tensors: places of the arguments that are tensors, or lists of them.
        written: places and names of the arguments that it writes to.
        is_random: it draws from a generator.
        has_running: it has running statistics, which it must not count again.
    """

    function: Any
    entry: Any
    is_noted: bool
    tensors: tuple[int, ...]
    written: tuple[tuple[int, str], ...]
    is_random: bool
    has_running: bool


def find_trait(function: Any) -> Trait:
    """What is known of a kind of operation, from its schema."""
    if not is_operation(function):
        return Trait(function, function, False, (), (), False, False)
    schema, name = function._schema, function._schema.name.partition("::")[2]
    written = [
        (place, argument)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    is_view = name in _VIEWS or any(
        value.alias_info is not None and not value.alias_info.is_write for value in schema.returns
    )
    is_noted = (
        function.namespace == "aten"
        and name not in _UNREPEATABLE
        and not is_view
        and not any("List" in str(argument.type) for _, argument in written)
    )
    places = tuple((place, argument.name) for place, argument in written)
    tensors = tuple(place for place, argument in enumerate(schema.arguments) if "Tensor" in str(argument.type))
    return Trait(function, entry_of(function), is_noted, tensors, places, is_random(function), name in _RUNNING)


def find_written(trait: Trait, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes to."""
    given = (args[place] if place < len(args) else kwargs.get(name) for place, name in trait.written)
    return [
        tensor
        for value in given
        for tensor in (value if isinstance(value, (list, tuple)) else (value,))
        if isinstance(tensor, Tensor)
    ]
