"""Memory of any device, to be fetched into memory of the CPU by another thread than the one that computes."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def mark_ready(values: Tensor) -> torch.cuda.Event | None:
    """When values are what they are now, however far their device has come; None where that is at once."""
    if not values.is_cuda:
        return None
    is_ready = torch.cuda.Event()
    is_ready.record(torch.cuda.current_stream(values.device))
    return is_ready


def fetch(values: Tensor, is_ready: torch.cuda.Event | None) -> Tensor:
    """The values in memory of the CPU; this thread waits for the copy, and the computing stream does not."""
    if is_ready is None:
        return values
    with torch.cuda.stream(_copying_stream(values.device)):
        is_ready.wait()
        return values.cpu()


@cache
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device: torch has 32 of them, which it hands out in turn, also to those who should not wait."""
    return torch.cuda.Stream(device)
