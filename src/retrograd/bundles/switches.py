"""What an operation's result depends on besides its arguments: random generators, and switches of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

MOST_THREADS = 1024
"""Threads of torch: nobody computes with more, and a process that asks for too many ends."""


def read_switches() -> dict[str, Any]:
    """The switches of torch that change bits, in the terms of JSON."""
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "mkldnn": torch.backends.mkldnn.enabled,
    }


def check_switches(switches: Mapping[str, Any]) -> None:
    """Check that these can be set.

    Raises:
        ValueError: a switch is missing, or has a value that it cannot have.
    """
    kinds = {name: type(value) for name, value in read_switches().items()}
    for name, kind in kinds.items():
        if type(switches.get(name)) is not kind:
            raise ValueError(f"the switch {name!r} is {switches.get(name)!r}")
    is_precision = switches["matmul_precision"] in {"highest", "high", "medium"}
    if not is_precision or not 1 <= switches["threads"] <= MOST_THREADS:
        raise ValueError(f"the switches {dict(switches)} cannot be set")
    if switches["default_dtype"] not in {"float64", "float32", "float16", "bfloat16"}:
        raise ValueError(f"the default dtype cannot be {switches['default_dtype']!r}")


@contextlib.contextmanager
def switched(switches: Mapping[str, Any]) -> Iterator[None]:
    """Set the switches as they were recorded, and back at the end."""
    before = read_switches()
    with contextlib.ExitStack() as stack:
        if switches["mkldnn"] != before["mkldnn"]:
            stack.enter_context(torch.backends.mkldnn.flags(enabled=switches["mkldnn"]))
        stack.callback(_set_switches, before)
        _set_switches(switches)
        yield


def devices_of(tensors: Sequence[Tensor | None]) -> tuple[str, ...]:
    """The devices, besides the CPU, whose random generators may matter for an operation on these tensors."""
    found = {str(tensor.device) for tensor in tensors if tensor is not None and tensor.is_cuda}
    return tuple(sorted(found))


def read_random(devices: Sequence[str]) -> dict[str, Tensor]:
    """The states of the random generators of the CPU and of these devices."""
    return {"cpu": torch.get_rng_state()} | {device: torch.cuda.get_rng_state(device) for device in devices}


def set_random(states: Mapping[str, Tensor]) -> None:
    """Set random generators."""
    for device, state in states.items():
        if device == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)


def _set_switches(switches: Mapping[str, Any]) -> None:
    """Set those that are otherwise; some of them cost a second to set, because torch loads its compiler."""
    now = read_switches()
    new = {name: switches[name] for name in now if switches[name] != now[name]}
    if "threads" in new:
        torch.set_num_threads(new["threads"])
    if {"deterministic", "warn_only"} & new.keys():
        torch.use_deterministic_algorithms(switches["deterministic"], warn_only=switches["warn_only"])
    if "matmul_precision" in new:
        torch.set_float32_matmul_precision(new["matmul_precision"])
    if "default_dtype" in new:
        torch.set_default_dtype(getattr(torch, new["default_dtype"]))
