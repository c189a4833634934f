"""A slab for CUDA devices: one kernel reads a tensor in one pass, and another merges what was read when it is taken."""

from __future__ import annotations

import ctypes
import sys
from array import array
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime import driver

from retrograd.core.statistics.cuda_kernel import Target, count_programs, merge_on_device, read_on_device
from retrograd.core.statistics.readable import untraced
from retrograd.core.statistics.torch_slab import PART, TorchSlab, split_flat

try:
    from retrograd.core.statistics._kernel import Launcher
except ImportError:  # installed without a compiler
    Launcher = None  # type: ignore[assignment, misc]

ON_CUDA = 2
"""As DLPack numbers the types of devices."""

LINES = 1 << 15
"""Parts that wait to be merged, 88 bytes each."""


class CudaSlab(TorchSlab):
    """As :class:`~retrograd.core.statistics.torch_slab.TorchSlab`, but the same elements give the same bits every time.

    Args:
        device: the device of the tensors that it will read.
        histogram: count binary exponents too.
        programs: kernel programs that run at once; None: as many as keep the device busy.
        turns: what counts the rows that are reached.
    """

    def __init__(
        self,
        device: str | torch.device = "cuda",
        histogram: bool = True,
        programs: int | None = None,
        turns: array[int] | None = None,
    ) -> None:
        super().__init__(device, histogram, turns)
        self._programs = programs or count_programs(self.device)
        self._lines = torch.empty((LINES, len(PART)), dtype=torch.float64, device=self.device)
        self._lines_at = self._lines.data_ptr()
        self._used = 0
        self._counts: list[int] = []
        self._launcher = make_launcher(self.device)
        self._streams: set[int] = set()
        self._kernels: dict[int, Any] = {}

    def observe(self, tensor: Tensor, row: int, /) -> bool:
        if not self._launch(tensor, None, row):
            return super().observe(tensor, row)
        return tensor.requires_grad

    def observe_update(self, new: Tensor, old: Tensor, row: int, /) -> None:
        if not self._launch(new, old, row):
            super().observe_update(new, old, row)

    def _launch(self, new: Tensor, old: Tensor | None, row: int) -> bool:
        """Read a plain tensor by a kernel that is compiled; return whether that could be."""
        launcher = self._launcher
        if launcher is None:
            return False
        self._check(row)
        with self._lock:
            if self._used + self._programs > LINES:
                with torch.no_grad(), untraced():
                    self._settle()
            bins_at = self._bins.data_ptr()  # that of now: to grow moves them
            programs = launcher.read(new, old, self._lines_at, bins_at, self._used, row, self._programs)
            if programs < 0:
                return False
            if programs:
                self._add_lines(row, programs, 1)
            self._count(row)
        return True

    def _fold(self, new: Tensor, old: Tensor | None, row: int, repeats: int) -> None:
        size = new.numel() if new.is_contiguous() else self._chunk
        before_pieces = repeat(None) if old is None else split_flat(old, size)
        for after, before in zip(split_flat(new, size), before_pieces, strict=False):
            if self._used + self._programs > LINES:
                self._settle()
            to = Target(self._lines, self._used, self._bins, row)
            programs, kernel = read_on_device(after, before, to, repeats, self._programs)
            self._add_lines(row, programs, repeats)
            if self.device.type == "cuda":
                self._streams.add(torch.cuda.current_stream(self.device).cuda_stream)
            if self._launcher is not None and learn(self._launcher, after, before, kernel):
                self._kernels[kernel.function] = kernel  # it stays loaded as long as it may be launched

    def _add_lines(self, row: int, programs: int, repeats: int) -> None:
        self._counts.append(programs)
        self._used += programs
        self._part_rows.append(row)
        self._part_repeats.append(repeats)

    def _settle(self) -> None:
        here, others = self._find_streams()
        for stream in others:
            here.wait_stream(stream)
        if self._counts:
            counts = np.array(self._counts, np.int32)
            places = np.stack([np.cumsum(counts, dtype=np.int32) - counts, counts], axis=1)
            on_device = self._to_device(torch.from_numpy(places))
            self._parts.append(merge_on_device(self._lines, on_device, self._programs))
            self._counts, self._used = [], 0
        for stream in others:  # what is read there next goes where this was
            stream.wait_stream(here)

    def _find_streams(self) -> tuple[Any, list[Any]]:
        """The stream of this thread, and others on which something was read since."""
        if self.device.type != "cuda":
            return None, []
        here = torch.cuda.current_stream(self.device)
        used = self._streams.union(self._launcher.take_streams() if self._launcher else ())
        self._streams.clear()
        return here, [find_stream(each, self.device) for each in used - {here.cuda_stream}]


def find_stream(handle: int, device: torch.device) -> Any:
    """The stream that CUDA knows by this handle."""
    return torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)


def make_launcher(device: torch.device) -> Launcher | None:
    """What launches compiled kernels; None where the driver is not found, or nothing is compiled."""
    if Launcher is None or device.type != "cuda":
        return None
    number = torch.cuda.current_device() if device.index is None else device.index
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        functions = cuda.cuLaunchKernel, cuda.cuCtxGetDevice
    except (OSError, AttributeError):
        return None
    launch, find_device = (ctypes.cast(each, ctypes.c_void_p).value or 0 for each in functions)
    return Launcher(ON_CUDA, number, driver.active.get_current_stream, launch, find_device)


def learn(launcher: Launcher, new: Tensor, old: Tensor | None, kernel: Any) -> bool:
    """Have a kernel launched again that Triton has compiled; return whether it needs no more than its arguments."""
    about = getattr(kernel, "metadata", None)
    if about is None or any(getattr(about, name, 0) for name in ("global_scratch_size", "profile_scratch_size")):
        return False
    if getattr(about, "num_ctas", 1) != 1 or not isinstance(kernel.function, int):
        return False
    launcher.learn(new, old, kernel.function, 32 * about.num_warps, about.shared)
    return True
