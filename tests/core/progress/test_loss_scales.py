"""What losses are scaled by."""

from __future__ import annotations

import torch

from retrograd.core.progress.steps import LossScales


def test_scales_are_found_by_loss_and_forgotten() -> None:
    scales = LossScales()
    first, second, other = (torch.ones(1) for _ in range(3))
    assert scales.find([first]) is None
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    scales.add([first], one)
    scales.add([second], two)
    assert scales.find([second]) is two
    assert scales.find([other]) is one  # something computed of the loss that still waits
    assert scales.find([first]) is one
    assert scales.find([other]) is None  # all have had their pass
    scales.forget()
    assert scales.find([second]) is None
    for _ in range(100):
        scales.add([first], one)
    assert len(scales._scaled) <= 16
