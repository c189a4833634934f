"""The state of generators of random numbers, and how an operation draws the same numbers again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor


def read_random_state(device: torch.device) -> Tensor:
    """What the default generator of a device draws from next; the device is not waited for."""
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
