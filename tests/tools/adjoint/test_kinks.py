"""Where a function has no derivative, no backward can be its adjoint: that is not a fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograd.tools.adjoint.adjoint_check import Verdict
from retrograd.tools.adjoint.check import check_adjoint
from tests.tools.adjoint.planted import saving


def relu(wrong: bool) -> Any:
    return saving(lambda x: x.clamp(min=0), lambda gradient, x: gradient * (x > 0) * (0.5 if wrong else 1))


ties = torch.tensor([[0.0, 0.0, 1.0, 1.0], [-1.0, -2.0, -2.0, 0.0]]).reshape(1, 1, 2, 4)

AT_A_KINK = {
    "relu at zero": (nn.ReLU(), torch.zeros(3, 4)),
    "a few zeros": (nn.ReLU(), torch.randn(3, 4).relu()),
    "relu of one's own": (relu(wrong=False), torch.randn(3, 4).relu()),
    "max pool with ties": (nn.MaxPool2d(2), ties),
    "max with ties": (lambda x: x.amax(-1), ties),
    "hardtanh at its border": (nn.Hardtanh(), torch.ones(3, 4)),
    "l1 loss at zero": (nn.L1Loss(reduction="sum"), (torch.ones(3), torch.tensor([1.0, 2.0, 3.0]))),
}


@pytest.mark.parametrize("name", AT_A_KINK)
def test_a_kink_is_no_fault(name: str) -> None:
    model, batch = AT_A_KINK[name]
    check = check_adjoint(model, batch)
    assert check
    assert {row.verdict for row in check} <= {Verdict.KINK, Verdict.OK}


@pytest.mark.parametrize("name", ["relu at zero", "a few zeros", "relu of one's own", "max pool with ties"])
def test_a_kink_is_named(name: str) -> None:
    check = check_adjoint(*AT_A_KINK[name])
    assert [row.verdict for row in check] == [Verdict.KINK]
    assert "close by, both agree" in str(check)


def test_a_fault_at_a_kink_is_a_fault() -> None:
    (row,) = check_adjoint(relu(wrong=True), torch.randn(3, 4).relu()).faults
    assert "0.5 times the right gradient" in row.reason


@pytest.mark.parametrize("function", [torch.sqrt, lambda x: x.pow(0.3)])
def test_a_gradient_that_is_infinite_at_one_point(function: Any) -> None:
    check = check_adjoint(function, torch.tensor([0.0, 1.0, 2.0]))
    assert not check
    (row,) = check.faults
    assert row.verdict is Verdict.NOT_FINITE
    assert "1 of 3 numbers are infinite" in row.reason


def test_a_gradient_that_is_nan_everywhere() -> None:
    def trap(x: Tensor) -> Tensor:
        return torch.where(x > -100, x, (x - x).sqrt() / 0)

    (row,) = check_adjoint(trap, torch.randn(3, 4)).faults
    assert "not finite" in row.reason


def test_dead_units_agree_on_zero() -> None:
    (row,) = check_adjoint(nn.ReLU(), -torch.rand(3, 4) - 1)
    assert row.verdict is Verdict.OK
    assert row.forward == row.backward == 0


def test_a_function_that_draws_from_nowhere() -> None:
    state = [0.0]

    def drifting(x: Tensor) -> Tensor:
        state[0] += 1
        return x * state[0]

    check = check_adjoint(drifting, torch.randn(3))
    assert not check
    assert [row.verdict for row in check] == [Verdict.RANDOM]
