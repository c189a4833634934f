"""What must never pass: numbers that are not finite, what is drawn at random, what has no graph, zeros that agree."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograd.core.errors import AdjointError
from retrograd.tools.adjoint.adjoint_check import Verdict
from retrograd.tools.adjoint.check import check_adjoint
from tests.tools.adjoint.planted import saving

generator = torch.Generator().manual_seed(5)
own = torch.Generator().manual_seed(6)
ODDS = torch.rand(12, generator=generator)
NAN, INF = float("nan"), float("inf")

NOT_FINITE: dict[str, tuple[Any, Any, Verdict, str]] = {
    "a root behind where": (
        lambda x: torch.where(x > 0, x.sqrt(), torch.zeros_like(x)), torch.tensor([0.0, 1, 2]),
        Verdict.WRONG, "1 of 3 numbers are NaN",
    ),
    "the root of a square": (lambda x: (x * x).sqrt(), torch.tensor([0.0, 0, 2]), Verdict.WRONG, "2 of 3"),
    "a root at zero": (torch.sqrt, torch.tensor([0.0, 1]), Verdict.NOT_FINITE, "1 of 2 numbers are infinite"),
    "a logarithm of less than zero": (
        torch.log, -torch.ones(3), Verdict.NOT_FINITE, "3 of 3 numbers that it returns are not finite; all that it is",
    ),
    "a logarithm of zero": (torch.log, torch.zeros(3), Verdict.NOT_FINITE, "that it returns are not finite"),
    "NaN into a relu": (nn.ReLU(), torch.tensor([1.0, NAN]), Verdict.NOT_FINITE, "1 of 2 numbers that it returns"),
    "infinity into a relu": (nn.ReLU(), torch.tensor([1.0, INF]), Verdict.NOT_FINITE, "so is what it is given"),
    "too much for float32": (torch.exp, torch.tensor([1.0, 100.0]), Verdict.NOT_FINITE, "in torch.float32, 1 of 2"),
}  # fmt: skip

RANDOM: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "bernoulli": (torch.bernoulli, ODDS),
    "one of it": (torch.bernoulli, torch.tensor([0.5])),
    "much of it": (torch.bernoulli, torch.rand(20_000, generator=generator)),
    "multinomial": (lambda x: torch.multinomial(x, 2).float(), ODDS),
    "noise alone": (torch.randn_like, ODDS),
    "a generator of its own": (lambda x: x * torch.rand(12, generator=own), ODDS),
    "odds and a generator of its own": (lambda x: torch.bernoulli(x, generator=own), ODDS),
}

NO_GRAPH: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "whole numbers": (lambda x: (x * 10).long().float(), "in jumps"),
    "a place": (lambda x: x.argmax().float(), "in jumps"),
    "a mask": (lambda x: (x > 0.5).float(), "in jumps"),
    "a constant": (torch.ones_like, "has no graph"),
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_not_finite(name: str) -> None:
    model, batch, verdict, words = NOT_FINITE[name]
    check = check_adjoint(model, batch)
    assert not check
    (row,) = check.faults
    assert row.verdict is verdict
    assert words in row.reason
    assert words in str(check)


@pytest.mark.parametrize("name", RANDOM)
def test_random(name: str) -> None:
    check = check_adjoint(*RANDOM[name])
    assert not check
    assert [row.verdict for row in check.faults] == [Verdict.RANDOM]
    assert "is random" in str(check)


@pytest.mark.parametrize("name", NO_GRAPH)
def test_no_graph(name: str) -> None:
    function, words = NO_GRAPH[name]
    check = check_adjoint(function, ODDS)
    assert not check
    (row,) = check.faults
    assert row.verdict is Verdict.NO_GRAPH
    assert words in row.reason


@pytest.mark.parametrize("model", [nn.Dropout(0.5), nn.Sequential(nn.ReLU(), nn.Dropout(0.5)), nn.RReLU()])
@pytest.mark.parametrize("sign", [1, -1])
def test_noise_that_a_gradient_goes_through_is_fine(model: nn.Module, sign: int) -> None:
    batch = sign * (1 + torch.rand(5, 4, generator=generator))
    assert {row.verdict for row in check_adjoint(model, batch)} == {Verdict.OK}


@pytest.mark.parametrize("function", [torch.round, torch.sign, lambda x: x * 0])
def test_a_gradient_that_is_zero_and_right(function: Callable[[Tensor], Tensor]) -> None:
    (row,) = check_adjoint(function, 0.3 + torch.rand(6, generator=generator) / 9)
    assert row.verdict is Verdict.OK


def test_whole_numbers_are_nothing_to_compare() -> None:
    with pytest.raises(AdjointError, match="returned one"):
        check_adjoint(lambda x: torch.multinomial(x, 2), ODDS)
    with pytest.raises(AdjointError, match="returned one"):
        check_adjoint(lambda x: x[:0], ODDS)


def test_a_fault_that_zeros_hide() -> None:
    """A layer that begins with zeros gives its input no gradient, whatever the factor."""
    wrong = saving(lambda x, weight: x * weight, lambda gradient, x, weight: (3 * gradient * weight, gradient * x))
    (row,) = check_adjoint(wrong, (ODDS, torch.zeros(12))).faults
    assert str(row.site) == "Odd:input.args.0"
    assert "3 times the right gradient" in row.reason
    assert "close by" in row.reason


def test_right_layers_that_begin_with_zeros() -> None:
    layer = nn.Linear(4, 4)
    nn.init.zeros_(layer.weight)
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Tanh(), nn.Linear(4, 2))
    assert {row.verdict for row in check_adjoint(model, torch.randn(3, 4))} == {Verdict.OK}


def test_what_is_around_is_blamed_on_what_is_random_within() -> None:
    class Sampled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.bernoulli(x.sigmoid())

    check = check_adjoint(nn.Sequential(nn.Linear(4, 4), Sampled(), nn.Linear(4, 2)), torch.randn(8, 4))
    assert not check
    assert {row.caller_name for row in check.faults} == {"1"}
    assert [row.reason for row in check if row.verdict is Verdict.RANDOM and row.caller_name == "self"] == [
        "because of 1"
    ]


class Positions(nn.Module):
    """Of the shape of what it is given."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[-1], dtype=x.dtype).sin()


class Masking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)


class Around(nn.Module):
    def __init__(self, inner: nn.Module, *, is_fed_by_data: bool = False) -> None:
        super().__init__()
        self.fc, self.inner, self.is_fed_by_data = nn.Linear(4, 4), inner, is_fed_by_data

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc(x)
        return hidden * self.inner(x if self.is_fed_by_data else hidden)


def test_parts_without_a_graph() -> None:
    """That compute positions from a shape, or a mask from data, are no fault; a mask from activations is told."""
    batch = torch.randn(8, 4)
    for model in (Around(Positions()), Around(Masking(), is_fed_by_data=True)):
        check = check_adjoint(model, batch)
        assert check, check
        assert {row.verdict for row in check if row.caller_name == "inner"} == {Verdict.NOT_CHECKED}
    (row,) = check_adjoint(Around(Masking()), batch).faults
    assert row.caller_name == "inner"
    assert row.verdict is Verdict.NO_GRAPH


def test_running_statistics_and_layers_that_write_in_place_are_fine() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True)).train()
    assert {row.verdict for row in check_adjoint(model, torch.randn(6, 4))} == {Verdict.OK}


def test_a_counter_in_a_forward() -> None:
    counter = itertools.count(1)
    (row,) = check_adjoint(lambda x: x * next(counter), ODDS).faults
    assert row.verdict is Verdict.RANDOM
    assert "something else each time" in row.reason


@pytest.mark.parametrize(
    "function",
    [torch.abs, torch.conj, torch.exp, torch.angle, torch.real, lambda z: z.conj() * z, lambda z: (z.imag**2).sum()],
)
def test_complex_functions_holomorphic_or_not(function: Callable[[Tensor], Tensor]) -> None:
    (row,) = check_adjoint(function, torch.randn(5, dtype=torch.complex64))
    assert row.verdict is Verdict.OK


def sine(change: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor]:
    """With what a change makes of its right gradient."""
    return saving(torch.sin, lambda gradient, x: change(gradient * x.cos()))


def test_small_faults() -> None:
    batch = torch.randn(100_000, generator=generator)
    one = torch.zeros(100_000, dtype=torch.float64)
    one[777] = 0.5
    assert check_adjoint(sine(lambda gradient: gradient), batch)
    assert not check_adjoint(sine(lambda gradient: gradient * (1 + one)), batch)
    (row,) = check_adjoint(sine(lambda gradient: gradient * 1.001), batch[:30]).faults
    assert "1.001 times the right gradient" in row.reason
    (row,) = check_adjoint(sine(lambda gradient: None), batch[:30]).faults
    assert "no gradient arrives" in row.reason
