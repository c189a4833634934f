"""The machine that a benchmark runs on: its settings, its memory, and how fast its link to the host is."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from torch import Tensor

ON_DEVICE = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_DEVICE else "cpu")

_SAMPLE = 256 << 20
_COPIES = 8


def use_tf32() -> None:
    """Products and convolutions of float32 on a device take it rounded to ten bits, as most who train there do."""
    if ON_DEVICE:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True


def describe_machine() -> str:
    """The machine, what drives it, and what decides about the numbers and the time of products."""
    memory = psutil.virtual_memory().total
    host = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, {memory / 1e9:.0f} GB"
    if not ON_DEVICE:
        return f"{host}, {torch.get_num_threads()} thread, torch {torch.__version__}"
    properties = torch.cuda.get_device_properties(DEVICE)
    device = f"{properties.name}, {properties.total_memory / 1e9:.1f} GB, driver {_driver()}"
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    products = f"float32 products: {torch.get_float32_matmul_precision()}"
    convolutions = "TF32" if torch.backends.cudnn.allow_tf32 else "float32"
    return f"{host}; {device}; {versions}; {products}, convolutions: {convolutions}"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        return f"unknown ({type(error).__name__})"


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if ON_DEVICE:
        torch.cuda.synchronize()


def release_memory() -> None:
    """Give back what torch keeps of the device's memory, so that no contender is measured in the pieces of another."""
    if ON_DEVICE:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def release_pinned() -> None:
    """Give back what torch keeps of pinned memory: that of two contenders may be more than there is."""
    if ON_DEVICE:
        torch.cuda.synchronize()
        older = getattr(torch._C, "_host_emptyCache", None)  # torch 2.11
        getattr(torch.accelerator, "empty_host_cache", older)()


def cached_bytes(path: Path) -> int:
    """How much of a file is in the page cache, by ``mincore``; 0 where that cannot be asked."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return 0
    length, libc = os.fstat(descriptor).st_size, ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    pages = (ctypes.c_ubyte * (-(-length // 4096)))()
    address = libc.mmap(None, ctypes.c_size_t(length), 1, 1, descriptor, ctypes.c_long(0)) if length else None
    if address:
        libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(length), pages)
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(length))
    os.close(descriptor)
    return 4096 * sum(page & 1 for page in pages)


def held_bytes() -> int:
    if ON_DEVICE:
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)
    return read_status("RssAnon")  # not the pages of libraries, of which more are used with each new operation


def forget_peak() -> None:
    if ON_DEVICE:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    if ON_DEVICE:
        return torch.cuda.max_memory_allocated()
    return read_status("VmHWM")


def read_status(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{name}:")[1].split()[0])


class LinkSpeed(NamedTuple):
    """Bytes a second between pinned memory and the device, alone and while the other direction is busy."""

    out: float
    back: float
    out_beside: float
    back_beside: float

    def __str__(self) -> str:
        out, back, out_beside, back_beside = (f"{speed / 1e9:.1f}" for speed in self)
        return f"{out} GB/s away from the device and {back} back; {out_beside} and {back_beside} at once"


def measure_link() -> LinkSpeed:
    """The link of a device, by copies of 256 MB."""
    host = [torch.empty(_SAMPLE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(_SAMPLE, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    out, back = (host[0], there[0]), (there[1], host[1])
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    _copy(streams, [out, back])  # memory is touched for the first time
    nbytes = _COPIES * _SAMPLE
    alone = [nbytes / max(_copy(streams, [pair])) for pair in (out, back)]
    together = [nbytes / seconds for seconds in _copy(streams, [out, back])]
    return LinkSpeed(*alone, *together)


def _copy(streams: Sequence[torch.cuda.Stream], pairs: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """Copy each source to its target several times, all pairs at once; returns how long each pair took, in seconds."""
    synchronize()
    began = time.perf_counter()
    events = []
    for stream, (target, source) in zip(streams, pairs, strict=False):
        with torch.cuda.stream(stream):
            for _ in range(_COPIES):
                target.copy_(source, non_blocking=True)
            events.append(stream.record_event())
    seconds = []
    for event in events:
        event.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds
