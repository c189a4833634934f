"""What the CUDA kernel must read right: on a device, or, run as a program, in Triton's interpreter on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from retrograd.core.statistics import cuda_slab
from retrograd.core.statistics.cuda_kernel import Target, read_on_device
from retrograd.core.statistics.cuda_slab import CudaSlab
from tests.core.statistics.oracle import assert_reads, assert_row, drain, elements, expected_bins

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8, torch.bool]
SPECIAL = [1.0, float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, -2.5]


def check_kernel(device: str, programs: int | None) -> None:
    """Compare with numpy every kind of tensor the kernel treats differently."""
    slab = CudaSlab(device, histogram=True, programs=programs)
    random = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        for size in (1, 4096, 40_001):
            assert_reads(slab, (torch.randn(size, generator=random) * 3).to(dtype).to(device))
    for factor in (1e-30, 1e30):
        assert_reads(slab, torch.randn(5000, generator=random).to(device) * factor)
    for x in (torch.randn(9000, generator=random) + 1e4, torch.tensor(SPECIAL).repeat(700)):
        assert_reads(slab, x.to(device))
    x = torch.randn(30, 40, generator=random).to(device)
    for view in (x.t(), x[:, ::3], x[:1].expand(17, -1), x[0, 0], x[:0]):
        assert_reads(slab, view)
    check_update(slab, x.t(), x.t() * 1.01)
    check_update(slab, x[:, ::2].bfloat16(), x[:, 1::2].bfloat16())
    check_update(slab, x.double(), x.double() * 3)
    check_calls(slab, [x, x + 5, x.t()])
    check_calls(CudaSlab(device, histogram=False, programs=programs), [x])
    check_many(device)
    if device == "cpu":
        slab._launcher = Relaunched(slab)  # type: ignore[assignment]
        check_calls(slab, [x, x[:, ::3], x * 2, x[:0]])
        check_update(slab, x, x * 1.01)
        assert slab._launcher.count == 4


class Relaunched:
    """Stands for what launches compiled kernels, for contiguous tensors."""

    def __init__(self, slab: CudaSlab) -> None:
        self.slab = slab
        self.count = 0

    def read(self, new: torch.Tensor, old: Any, parts: int, bins: int, line: int, row: int, programs: int) -> int:
        if not new.is_contiguous():
            return -1
        assert (parts, bins) == (self.slab._lines.data_ptr(), self.slab._bins.data_ptr())
        self.count += 1
        if not new.numel():
            return 0
        old = None if old is None else old.flatten()
        to = Target(self.slab._lines, line, self.slab._bins, row)
        return read_on_device(new.flatten(), old, to, 1, programs)[0]

    def learn(self, *_: Any) -> None:
        raise AssertionError("the interpreter compiles nothing")


def check_many(device: str) -> None:
    """More readings than there are lines for, so that some are merged before all are taken."""
    lines, cuda_slab.LINES = cuda_slab.LINES, 12
    try:
        check_calls(CudaSlab(device, programs=5), [torch.arange(3.0 + 4096 * at).to(device) for at in range(6)])
    finally:
        cuda_slab.LINES = lines


def check_update(slab: CudaSlab, new: torch.Tensor, old: torch.Tensor) -> None:
    slab.observe_update(new, old, 0)
    rows, bins = drain(slab)
    wide = torch.promote_types(new.dtype, torch.float32)
    change = elements(new.to(wide) - old.to(wide))
    assert_row(rows[0], change)
    np.testing.assert_array_equal(bins[0], expected_bins(change))
    np.testing.assert_allclose(rows[0]["reference"], (elements(old) ** 2).sum(), rtol=1e-6)


def check_calls(slab: CudaSlab, tensors: list[torch.Tensor]) -> None:
    slab.grow(3)
    for tensor in tensors:
        slab.observe(tensor, 2)
    rows, bins = drain(slab)
    everything = np.concatenate([elements(tensor) for tensor in tensors])
    assert_row(rows[0], everything, calls=len(tensors))
    if slab.histogram:
        np.testing.assert_array_equal(bins[0], expected_bins(everything))


if __name__ == "__main__":
    check_kernel("cpu", programs=5)
    print("all cases agree")
