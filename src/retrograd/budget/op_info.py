"""Op info: what a kind of operation writes to, whether it can be repeated, and from which generator it draws."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
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
class OpInfo:
    """A kind of operation, and what its schema says of it.

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


def find_op_info(function: Any) -> OpInfo:
    """Read the schema of a kind of operation."""
    if not is_operation(function):
        return OpInfo(function, function, False, (), (), False, False)
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
    return OpInfo(function, entry_of(function), is_noted, tensors, places, is_random(function), name in _RUNNING)


def find_written(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes to."""
    given = (args[place] if place < len(args) else kwargs.get(name) for place, name in info.written)
    return [
        tensor
        for value in given
        for tensor in (value if isinstance(value, (list, tuple)) else (value,))
        if isinstance(tensor, Tensor)
    ]


def read_random_state(device: torch.device) -> Tensor:
    """Read the state of a device's default generator; the device is not waited for."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.default_generator.get_state()


def write_random_state(device: torch.device, state: Tensor) -> None:
    """Draw from here."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def can_be_read(device: torch.device) -> bool:
    """Whether there is a generator that can be asked now."""
    return device.type == "cpu" or (device.type == "cuda" and not torch.cuda.is_current_stream_capturing())


@contextmanager
def draw_again(
    operation: Any, args: list[Any], kwargs: dict[str, Any], state: Tensor, device: torch.device
) -> Iterator[None]:
    """The operation draws from here, and the program's generators are afterwards as they were.

    It is given a generator of its own if it takes one; else other threads must not draw from the default one meanwhile.
    """
    place, name = _find_generator(operation)
    if name:
        generator = torch.Generator(device)
        generator.set_state(state)
        if place < len(args):
            args[place] = generator
        else:
            kwargs[name] = generator
        yield
        return
    now = read_random_state(device)
    write_random_state(device, state)
    try:
        yield
    finally:
        write_random_state(device, now)


@cache
def _find_generator(operation: Any) -> tuple[int, str]:
    """Place and name of the argument that is a generator; no name where there is none."""
    for place, argument in enumerate(operation._schema.arguments):
        if "Generator" in str(argument.type):
            return place, str(argument.name)
    return 0, ""
