"""Random nets: right ones agree in everything, and a factor planted anywhere is found there and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from retrograd.tools.adjoint.adjoint_check import Verdict
from retrograd.tools.adjoint.check import check_adjoint
from tests.tools.adjoint.planted import Applied, saving

WIDTH = 5

PARTS: dict[str, Any] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "relu": nn.ReLU,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "dropout": lambda: nn.Dropout(0.3),
    "softmax": lambda: nn.Softmax(-1),
    "residual": lambda: Residual(nn.Linear(WIDTH, WIDTH)),
    "gate": lambda: Gate(),
}


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.b(x).sigmoid()


def scaling(factor: float) -> nn.Module:
    return Applied(saving(lambda x: x * 2, lambda gradient, x: gradient * 2 * factor))


nets = st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=5)


@settings(max_examples=12, deadline=None)
@given(nets, st.integers(0, 1000))
def test_right_nets_agree(parts: list[str], seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(*(PARTS[part]() for part in parts))
    check = check_adjoint(model, torch.randn(6, WIDTH), seed=seed)
    assert check, check
    assert {row.verdict for row in check} <= {Verdict.OK, Verdict.KINK}
    assert len(check) >= len(parts)


@settings(max_examples=12, deadline=None)
@given(nets, st.data(), st.floats(-2, 2).filter(lambda factor: abs(factor - 1) > 1e-3 and abs(factor) > 1e-3))
def test_a_planted_factor_is_found_where_it_is(parts: list[str], data: st.DataObject, factor: float) -> None:
    torch.manual_seed(7)
    place = data.draw(st.integers(0, len(parts)))
    modules = [PARTS[part]() for part in parts]
    modules.insert(place, scaling(factor))
    check = check_adjoint(nn.Sequential(*modules), torch.randn(6, WIDTH))
    (row,) = check.faults
    assert str(row.site) == f"{place}:input.x"
    assert row.backward / row.forward == pytest.approx(factor, rel=1e-5)
