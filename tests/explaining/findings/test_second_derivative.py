"""Functions of torch's that lose a part of a second derivative, and those that do not: against plain autograd."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograd.core.recording.record import record
from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.explain import explain


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        square = x * x  # here
        ctx.save_for_backward(square)
        return square * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (square,) = ctx.saved_tensors
        return 3 * square * gradient


class OfInput(torch.autograd.Function):
    """With a mask that is drawn, and a sign, which have no derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = (torch.ones_like(x) > 0).to(x.dtype)
        ctx.save_for_backward(x, mask, x.sign())
        return x**3 * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, mask, _ = ctx.saved_tensors
        return 3 * x**2 * mask * gradient


class OfOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        square = x * x
        ctx.save_for_backward(x, square)
        return square * x, square

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_square: Tensor) -> Tensor:
        x, square = ctx.saved_tensors
        return 3 * square * gradient + 2 * x * of_square


def cube(x: Tensor) -> Tensor:
    return Cube.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def of_input(x: Tensor) -> Tensor:
    return OfInput.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def of_output(x: Tensor) -> Tensor:
    return OfOutput.apply(x)[0]  # type: ignore[no-any-return, no-untyped-call]


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.function = nn.Linear(4, 8), nn.Linear(8, 1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))  # type: ignore[no-any-return]


def penalise(net: Net, *, twice: bool = True) -> None:
    x = torch.linspace(-1, 1, 24).view(6, 4).requires_grad_()
    output = net(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (gradient.square().sum() if twice else output.square().sum()).backward()


def find(net: Net, *, twice: bool = True) -> list[Finding]:
    with record(net) as recording:
        for _ in range(4):
            net.zero_grad()
            penalise(net, twice=twice)
    return list(explain(recording.history).of("second-derivative"))


def is_right(function: Callable[[Tensor], Tensor]) -> bool:
    """What plain autograd says: the gradient of the penalty is that of x³."""
    net, plain = Net(function), Net(lambda x: x**3)
    for each in (net, plain):
        penalise(each)
    pairs = zip(net.first.parameters(), plain.first.parameters(), strict=True)
    return all(a.grad is not None and torch.allclose(a.grad, b.grad, atol=1e-5) for a, b in pairs)  # type: ignore[arg-type]


def test_a_part_that_is_lost_is_named_with_its_line() -> None:
    assert not is_right(cube)
    (found,) = find(Net(cube))
    lines, first = inspect.getsourcelines(Cube)
    assert found.line == f"{__file__}:{first + next(n for n, text in enumerate(lines) if '# here' in text)}"
    assert found.message.startswith("Cube (")
    assert "saves what `mul`" in found.message


@pytest.mark.parametrize("function", [of_input, of_output])
def test_what_is_saved_rightly_is_none(function: Callable[[Tensor], Tensor]) -> None:
    assert is_right(function)
    assert find(Net(function)) == []


def test_a_graph_of_gradients_through_which_no_pass_runs_is_none() -> None:
    assert find(Net(cube), twice=False) == []
