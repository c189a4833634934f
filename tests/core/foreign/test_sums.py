"""Sums over tensors depend on what they hold, not on how it lies in memory."""

from __future__ import annotations

import pytest
import torch

from retrograd.core.foreign.sums import sum_tensor


@pytest.mark.parametrize("tensor", [torch.tensor(3.0).expand(1), torch.tensor([3.0, 4, 5])[::3]], ids=["0", "3"])
def test_a_single_element_of_any_stride(tensor: torch.Tensor) -> None:
    assert tensor.stride() != (1,)
    assert sum_tensor(tensor) == sum_tensor(torch.tensor([3.0]))
