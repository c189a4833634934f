"""Slabs of each kind."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from retrograd.core.statistics.readable import make_readable
from retrograd.core.statistics.slab import NativeSlab, Slab, TorchSlab, make_turns

CPU = torch.device("cpu")


def make_native(histogram: bool = True) -> Slab:
    if NativeSlab is None:
        pytest.skip("the kernel is not compiled here")
    return NativeSlab(histogram, partial(make_readable, device=CPU), make_turns())


@pytest.fixture(params=["native", "torch"])
def slab(request: pytest.FixtureRequest) -> Slab:
    """One slab with a histogram, of each kind."""
    return make_native() if request.param == "native" else TorchSlab("cpu", histogram=True)


@pytest.fixture(params=["native", "torch"])
def plain_slab(request: pytest.FixtureRequest) -> Slab:
    """One slab without a histogram, of each kind."""
    return make_native(histogram=False) if request.param == "native" else TorchSlab("cpu", histogram=False)


@pytest.fixture
def native() -> Slab:
    return make_native()
