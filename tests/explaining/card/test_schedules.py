"""What is said of learning rates is what torch's schedulers make."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from retrograd.explaining.card.optimizers import describe_shape

MAKE = {
    "constant": lambda optimizer: schedulers.ConstantLR(optimizer, factor=1.0),
    "falls by ×0.1 every 30 updates": lambda optimizer: schedulers.StepLR(optimizer, 30),
    "falls in 2 steps (to 0.01 after 20, to 0.001 after 70)": lambda o: schedulers.MultiStepLR(o, [20, 70]),
    "falls by ×0.95 each time": lambda optimizer: schedulers.ExponentialLR(optimizer, 0.95),
    "falls as a cosine": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 99),
    "falls as a cosine, not yet at its end": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 140),
    "falls in a line": lambda optimizer: schedulers.LinearLR(optimizer, 1.0, 0.1, 120),
    "falls": lambda optimizer: schedulers.PolynomialLR(optimizer, 100, power=3.0),
    "rises over 50 updates in a line, then constant": lambda optimizer: schedulers.LinearLR(optimizer, 0.1, 1.0, 50),
    "rises over 10 updates in a line, then falls as a cosine": lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, 0.1, 1.0, 10), schedulers.CosineAnnealingLR(optimizer, 90)],
        [10],
    ),
    "rises over 10 updates in a line, then falls in a line": lambda optimizer: schedulers.LambdaLR(
        optimizer, lambda step: min((step + 1) / 11, (101 - step) / 91)
    ),
    "rises over 9 updates in a line, then falls as 1/√step": lambda optimizer: schedulers.LambdaLR(
        optimizer, lambda step: min((step + 1) / 10, (10 / (step + 1)) ** 0.5)
    ),
    "rises over 10 updates in a line, then goes up and down between 0.001 and 0.1": lambda optimizer: (
        schedulers.CyclicLR(optimizer, 0.001, 0.1, 10)
    ),
}


def rates_of(make: object, steps: int = 100, every: int = 1) -> np.ndarray:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = make(optimizer)  # type: ignore[operator]
    rates = []
    for step in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step % every == every - 1:
            scheduler.step()
    return np.array(rates)


@pytest.mark.parametrize("shape", MAKE)
def test_schedules_of_torch_are_named(shape: str) -> None:
    assert describe_shape(rates_of(MAKE[shape])) == shape


def test_a_schedule_of_epochs_says_how_many_updates_these_have() -> None:
    rates = rates_of(lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 10), 100, every=10)
    assert describe_shape(rates) == "falls as a cosine, not yet at its end, every 10 updates"


@pytest.mark.parametrize("rates", [[0.1], [0.1, 0.1]])
def test_a_few_equal_rates_are_constant(rates: list[float]) -> None:
    assert describe_shape(np.array(rates)) == "constant"


def test_two_rates_make_no_curve() -> None:
    assert describe_shape(np.array([0.2, 0.1])) == "falls in 1 step (to 0.1 after 1)"
