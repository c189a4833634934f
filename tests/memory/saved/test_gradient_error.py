"""The error of gradients: what is measured, what is left as it was, and what cannot be asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograd.core.errors import SavedTensorError
from retrograd.memory.policies.policy import AsIs
from retrograd.memory.saved.gradient_error import measure_gradient_error


class Counting(nn.Module):
    """It replaces one buffer in each forward, and writes into another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.seen += x.sum()
        return self.linear(nn.functional.dropout(x))


@pytest.mark.parametrize("fails", [False, True])
def test_buffers_and_random_state_are_what_they_were(fails: bool) -> None:
    model, x, state = Counting(), torch.ones(3, 4), torch.get_rng_state()

    def loss() -> Tensor:
        value = model(x).sum()
        if fails:
            raise KeyError("mine")
        return value

    if fails:
        with pytest.raises(KeyError, match="mine"):
            measure_gradient_error(model, AsIs(), loss)
    else:
        assert measure_gradient_error(model, AsIs(), loss).total == 0
    assert model.calls == model.seen == 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        (torch.ones(()), "The loss must be a function, not a Tensor"),
        (lambda: nn.Linear(4, 4)(torch.ones(2, 4)), r"The loss has shape \[2, 4\]"),
        (lambda: torch.ones(()), "needs a gradient"),
        (lambda: nn.Linear(4, 1)(torch.ones(4)), "no gradient for any parameter of the model"),
    ],
)
def test_losses_that_nothing_can_be_measured_of(loss: Any, problem: str) -> None:
    with pytest.raises(SavedTensorError, match=problem):
        measure_gradient_error(nn.Linear(4, 1), AsIs(), loss)


def test_a_model_without_trained_parameters() -> None:
    frozen = nn.Linear(4, 1).requires_grad_(False)
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(SavedTensorError, match="no gradient for any parameter of the model"):
        measure_gradient_error(frozen, AsIs(), lambda: frozen(x))
