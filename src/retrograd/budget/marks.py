"""Moments of a pass, as the device sees them that computes it."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

Mark = float | torch.cuda.Event


def take_time(values: Tensor) -> Mark:
    """Now, as the device of these values sees it, without waiting for it."""
    if not values.is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(values.device))
    return event


def seconds_between(first: Mark, second: Mark) -> float:
    """Time between two marks; a device is waited for."""
    if isinstance(first, float) and isinstance(second, float) and not math.isnan(first + second):
        return max(0.0, second - first)
    if isinstance(first, torch.cuda.Event) and isinstance(second, torch.cuda.Event):
        first.synchronize()
        second.synchronize()
        return max(0.0, float(first.elapsed_time(second)) / 1000)
    return 0.0  # there is one mark alone, where a plan was followed at first
