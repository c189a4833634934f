"""What is said of programs of which not every step was recorded: nothing that rests on a step that was not seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.history.curve import Curve
from retrograd.core.runs.findings import Findings
from retrograd.explaining.findings.detectors.loss import find_jump


def train_with_a_jump(every: int, large: int) -> Findings:
    """Train a net, one update of which is very large; 900 steps; it takes long to recover."""
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with rg.record(model, schedule=every) as recording:
        for step in range(900):
            x = torch.randn(32, 10)
            optimizer.zero_grad()
            loss = (model(x) - x[:, :1]).square().mean()
            loss.backward()
            if step == large:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(3000)
            optimizer.step()
            if step == large:
                optimizer.param_groups[0]["lr"] = 0.001
    return rg.explain(recording)


@pytest.mark.parametrize("every", [5, 10])
def test_an_update_before_a_jump_that_was_not_recorded_is_not_called_usual(every: int) -> None:
    [found] = train_with_a_jump(every, 706).of("loss-spike")
    assert found.message.startswith("The loss jumped from ")
    assert found.message.endswith(
        f" between steps {710 - every} and 710, and did not come back; the update before it was not recorded."
    )
    assert "usual" not in str(found)
    assert "look at the batch" not in str(found)
    assert "--overhead none" in found.repair


def test_an_update_before_a_jump_that_was_recorded_is_judged() -> None:
    found = train_with_a_jump(1, 706)
    assert not found.of("loss-spike")
    [high] = found.of("learning-rate-too-high")
    assert "at step 706 an update changed the weights by" in high.message


def test_a_jump_is_found_among_losses_of_which_a_median_was_taken() -> None:
    curve = Curve(np.arange(10), np.array([1.0, 1, 1, 1, 1, 30, 30, 30, 30, 30]))
    assert find_jump(curve, 3, 9, 10.0) == (4, 5)
    assert find_jump(Curve(curve.steps * 10, curve.values), 40, 50, 10.0) == (40, 50)
