"""How fast memory leaves and comes back."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor

from retrograd.budget.backends import Carrier
from retrograd.budget.marks import seconds_between, take_time
from retrograd.budget.simulation import Link
from retrograd.policies.policy import Saved

_SAMPLE_BYTES = 4 << 20
_DEVICE_SAMPLE_BYTES = 32 << 20
"""4 MB go over a link in no more time than the program takes to ask for them."""
_SAMPLES = 4
_LATENCY = 50e-6
"""Seconds that the program spends on one stretch that is moved."""
_DEVICE_LATENCY = 5e-6
"""Seconds that a device waits for an event beyond when it takes place. It does not wait for the program."""


def measure_link(carrier: Carrier, device: torch.device) -> Link:
    """The speed of a carrier in both directions, from a few stretches there and back, twice.

    The first time files grow, and memory is pinned; so the speed is that of the second. The work of other threads is
    that of the first: while a model trains, they never find the processor's caches as warm as the second time.
    """
    nbytes = _SAMPLE_BYTES if device.type == "cpu" else _DEVICE_SAMPLE_BYTES
    first = torch.arange(nbytes // 8, device=device).view(torch.uint8)  # no zeros, and no random numbers
    samples = [first.clone() for _ in range(_SAMPLES)]
    carrier.finish()
    cold, warm = _go_there_and_back(carrier, samples), _go_there_and_back(carrier, samples)
    return replace(warm, work_out=max(cold.work_out, warm.work_out), work_back=max(cold.work_back, warm.work_back))


def _go_there_and_back(carrier: Carrier, samples: list[Tensor]) -> Link:
    began, at_first = take_time(samples[0]), time.process_time()
    loads = [carrier.carry_out(Saved(values, values.shape, "", 0)) for values in samples]
    for load in loads:
        if load is not None:
            load.leave()
    carrier.finish()
    between, at_half = take_time(samples[0]), time.process_time()
    for load in loads:
        if load is not None:
            load.want()
            load.take()
    ended, at_last = take_time(samples[0]), time.process_time()
    nbytes = sum(sample.nbytes for sample in samples)
    out, back = max(seconds_between(began, between), 1e-6), max(seconds_between(between, ended), 1e-6)
    is_beside = samples[0].device.type != "cpu"  # others make the copies
    if is_beside:
        return Link(nbytes / out, nbytes / back, _DEVICE_LATENCY)
    work_out, work_back = at_half - at_first, at_last - at_half
    return Link(nbytes / out, nbytes / back, _LATENCY, work_out / nbytes, work_back / nbytes)
