"""The state of a device's default generator."""

from __future__ import annotations

import torch
from torch import Tensor


def read_random_state(device: torch.device) -> Tensor:
    """What the generator will draw from next; the device is not waited for."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def write_random_state(device: torch.device, state: Tensor) -> None:
    """Draw from here."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def can_be_read(device: torch.device) -> bool:
    """Whether there is a generator that can be asked now."""
    return device.type == "cpu" or (device.type == "cuda" and not torch.cuda.is_current_stream_capturing())
