"""The CUDA kernel: interpreted where Triton is installed, and for real where there is a device."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from retrograd.core.hooks.engine import TORCH, parse_version
from retrograd.core.statistics.slab import TorchSlab, make_slab

HAS_TRITON = find_spec("triton") is not None
BESIDE = Path(sys.prefix, "triton")  # of `make triton`: on the path of torch, it would change what torch does

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, which CPU builds of torch lack")

OLD_INTERPRETER = HAS_TRITON and TORCH < (2, 12) and parse_version(np.__version__) >= (2, 4)
"""That of Triton 3.6, which comes with torch 2.11, asks NumPy for an index in a way that NumPy 2.4 refuses."""


@pytest.mark.skipif(not HAS_TRITON and not BESIDE.exists(), reason="needs Triton: `make triton`")
@pytest.mark.skipif(OLD_INTERPRETER, reason="the interpreter of Triton 3.6 does not work with NumPy 2.4 and later")
def test_kernel_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.core.statistics.kernel_cases"],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([*sys.path, str(BESIDE)])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "all cases agree" in done.stdout, done.stderr[-3000:]


@pytest.mark.gpu
@needs_triton
def test_kernel_on_a_device() -> None:
    from tests.core.statistics.kernel_cases import check_kernel

    check_kernel("cuda", programs=None)


@pytest.mark.gpu
@needs_triton
def test_the_same_elements_give_the_same_bits() -> None:
    slab = make_slab("cuda")
    slab.grow(1)
    x = torch.randn(3_000_001, device="cuda")
    drained = set()
    for _ in range(5):
        slab.observe(x, 0)
        drained.add(slab.drain())
    assert len(drained) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [make_slab, TorchSlab])
def test_only_drain_waits_for_the_device(kind: type[TorchSlab]) -> None:
    slab = kind("cuda", histogram=True)
    slab.grow(1)
    x = torch.randn(10_000, device="cuda")
    slab.observe(x, 0)  # the kernel is compiled at its first call
    slab.observe_update(x, x, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        slab.observe(x, 0)
        slab.observe_update(x, x, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert slab.drain()
