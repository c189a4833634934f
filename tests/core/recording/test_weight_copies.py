"""Copies of weights on a device, for which memory of the CPU stands."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from retrograd.core.recording import optimizer_watch
from retrograd.core.recording.optimizer_watch import copy_together


def test_copies_of_weights_on_a_device_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_watch, "is_far", lambda tensor: True)
    weights: list[torch.Tensor] = [
        nn.Parameter(torch.randn(4, 4)),
        nn.Parameter(torch.randn(3)),  # of no multiple of 16 bytes: those behind it would not be aligned
        torch.randn(8, 2, dtype=torch.float64),
        nn.Parameter(torch.randn(6, 4).t()),
        nn.Parameter(torch.randn(2, 2, 4)),
        nn.Parameter(torch.zeros(0, 4)),
    ]
    expected = [weight.detach().clone() for weight in weights]
    copies = list(copy_together(weights))
    joined = copies[0].untyped_storage().data_ptr()
    assert [each.untyped_storage().data_ptr() == joined for each in copies[:5]] == [True, False, False, False, True]
    with torch.no_grad():
        for weight in weights:
            weight.fill_(7)
    for copy, was in zip(copies, expected, strict=True):
        assert (copy.shape, copy.dtype, copy.requires_grad) == (was.shape, was.dtype, False)
        assert torch.equal(copy, was)
    assert all(copies[place].data_ptr() % 16 == 0 for place in (0, 4))
