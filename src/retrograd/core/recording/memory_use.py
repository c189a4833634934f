"""The memory that a program holds: that of a device as far as torch has given it out, else the whole process's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

_OF_PROCESS = Path("/proc/self/statm")
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def measure_memory(tensors: Sequence[torch.Tensor]) -> float:
    """Bytes of the devices on which some tensors are, or of the process where that is the CPU; NaN if not known."""
    devices = {each.device for each in tensors if each.device.type == "cuda"}
    if devices:
        return float(sum(torch.cuda.memory_allocated(device) for device in devices))
    with suppress(OSError, ValueError, IndexError):
        return float(int(_OF_PROCESS.read_text(encoding="ascii").split()[1]) * _PAGE)
    return float("nan")
