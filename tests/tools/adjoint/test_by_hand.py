"""An adjoint that somebody has written by hand is held against the layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograd.tools.adjoint.adjoint_check import Verdict
from retrograd.tools.adjoint.check import check_adjoint

A = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
U = torch.randn(4, generator=torch.Generator().manual_seed(3))


def layer(u: Tensor) -> Tensor:
    return u + A @ u


CASES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "right": (lambda v: v + A.T @ v, ""),
    "in a tuple": (lambda v: (v + A.T @ v,), ""),
    "transposed": (lambda v: v + A @ v, "a weight is transposed"),
    "half of it": (lambda v: (v + A.T @ v) / 2, "0.5 times the right gradient"),
    "a part": (lambda v: v, "no simple pattern"),
    "nothing": (lambda v: None, "no gradient arrives"),
    "another shape": (lambda v: v[:2], "shape [2]"),
    "too many": (lambda v: (v, v), "2 gradients for 1 arguments"),
    "an error": (lambda v: v @ torch.ones(9), "its adjoint raises RuntimeError"),
    "not finite": (lambda v: v / torch.zeros(4), "not finite"),
}


@pytest.mark.parametrize("name", CASES)
def test_of_a_function(name: str) -> None:
    adjoint, words = CASES[name]
    check = check_adjoint(layer, U, adjoint=adjoint)
    assert bool(check) is (not words)
    (row,) = check
    assert words in row.reason
    assert str(row.site) == "layer:input.u"


def test_in_float64() -> None:
    wide = A.double()
    (row,) = check_adjoint(lambda u: u + wide @ u, U.double(), adjoint=lambda v: v + wide.T @ v)
    assert row.verdict is Verdict.OK
    assert row.precision == "float64"


def test_of_what_has_no_graph() -> None:
    matrix = A.numpy()

    def multiply(u: Tensor) -> Tensor:
        return torch.from_numpy(matrix @ u.detach().float().numpy())

    assert check_adjoint(multiply, U, adjoint=lambda v: A.T @ v)
    assert not check_adjoint(multiply, U, adjoint=lambda v: A @ v)


def test_of_a_module_with_several_arguments() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Tanh()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            return a * b * self.weight, self.inner(a)

    a, b = torch.randn(3).double(), torch.randn(3).double()

    def adjoint(u: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return u * b + w * (1 - a.tanh() ** 2), u * a

    check = check_adjoint(Product(), (a, b), adjoint=adjoint)
    assert {str(row.site): row.verdict for row in check} == {"self:input.a": Verdict.OK, "self:input.b": Verdict.OK}


def test_of_a_complex_layer() -> None:
    batch = torch.randn(4, dtype=torch.complex64)
    assert check_adjoint(lambda z: (2 + 1j) * z, batch, adjoint=lambda v: (2 - 1j) * v)
    (row,) = check_adjoint(lambda z: (2 + 1j) * z, batch, adjoint=lambda v: (2 + 1j) * v).faults
    assert row.reason == "a complex conjugate is missing"


def test_where_there_is_no_derivative() -> None:
    """It could be compared close by, but the adjoint is that of this batch."""
    (row,) = check_adjoint(torch.relu, torch.zeros(3), adjoint=lambda v: v * 0)
    assert row.verdict is Verdict.NOT_CHECKED


def test_nothing_is_changed() -> None:
    model, state = nn.Linear(3, 3), torch.get_rng_state()
    weight = model.weight.detach()
    assert check_adjoint(model, torch.ones(2, 3), adjoint=lambda v: (v + torch.rand(()) * 0) @ weight.double())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.weight.grad is None
