"""Several backward passes: over one forward, with a graph of their own, from parts of the model, within a forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.core.recording.collector import collect
from tests.core.recording.oracle import assert_row, listen


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


PATHS = ("0", "1", "2", "self")


def test_losses_are_those_that_backward_starts_from() -> None:
    net = make_net()
    losses = []
    with collect(net) as seen:
        for _ in range(3):
            loss = net(torch.randn(5, 3)).square().mean()
            losses.append(loss.item())
            loss.backward()
            loss.detach().mul_(100)  # changed by the user afterwards
    assert [event.value for event in seen.events_of("loss")] == losses


def test_a_gradient_penalty_keeps_the_two_passes_apart() -> None:
    net = make_net()
    x = torch.randn(5, 3, requires_grad=True)
    with listen(net) as oracle, collect(net) as seen:
        out = net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.mean() + (slope.norm() - 1) ** 2
        loss.backward()
    assert [event.value for event in seen.events_of("loss")] == [loss.item()]
    for path in PATHS:
        assert_row(seen.one(f"{path}:output"), oracle.values[path][0])
        assert len(oracle.gradients[path][0]) == 2
        for backward, gradient in enumerate(oracle.gradients[path][0]):
            assert_row(seen.one(f"{path}:output.grad", backward=backward), gradient)
    assert [row.backward for row in seen.all("0:weight.grad")] == [1]  # the first pass went to the input alone


def test_second_derivatives_through_inputs() -> None:
    net = make_net()
    x = torch.randn(5, 3, requires_grad=True)
    with collect(net, sites="*:input*") as seen:
        out = net(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        slope.square().sum().backward()
    assert_row(seen.one("0:input.input.grad", backward=0), slope)
    assert not seen.facts["faults"]


@pytest.mark.parametrize("sites", ["*:output", "0:weight.grad", "*:input*"])
def test_passes_are_counted_whatever_is_recorded(sites: str) -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with collect(net, sites=sites) as seen:
        for _ in range(2):
            for _ in range(2):
                net(torch.randn(5, 3, requires_grad=True)).sum().backward()
            optimizer.step()
    assert {(row.step, row.micro, row.phase) for row in seen.rows} == {
        (s, m, "train") for s in range(2) for m in range(2)
    }


class _Backwards(torch.autograd.Function):
    """Euler's method for dy/dt = f(y), whose backward solves the adjoint equation, differentiating f on its way."""

    @staticmethod
    def forward(ctx: Any, f: nn.Module, y: torch.Tensor, steps: int, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.f, ctx.steps, ctx.parameters = f, steps, parameters
        for _ in range(steps):
            y = y + 0.1 * f(y)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (y,) = ctx.saved_tensors
        totals = [torch.zeros_like(parameter) for parameter in ctx.parameters]
        for _ in range(ctx.steps):
            with torch.enable_grad():
                y = y.detach().requires_grad_()
                slope = ctx.f(y)
            change, *shares = torch.autograd.grad(slope, (y, *ctx.parameters), gradient)
            totals = [total + 0.1 * share for total, share in zip(totals, shares, strict=True)]
            y, gradient = y.detach() - 0.1 * slope.detach(), gradient + 0.1 * change
        return None, gradient, None, *totals


class _Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.f, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Backwards.apply(self.f, self.first(x), 3, *self.f.parameters())
        return self.last(y)


def test_a_function_that_differentiates_in_its_backward_makes_no_passes_of_ours() -> None:
    net = _Flow()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses: list[float] = []
    gradients: list[dict[str, torch.Tensor]] = []
    with collect(net) as seen:
        for _ in range(4):
            optimizer.zero_grad()
            loss = net(torch.randn(5, 3)).square().sum()
            loss.backward()
            losses.append(loss.item())
            gradients.append({name: parameter.grad.clone() for name, parameter in net.named_parameters()})  # type: ignore[union-attr]
            optimizer.step()
    assert [event.value for event in seen.events_of("loss")] == losses
    for step, of_step in enumerate(gradients):
        for name, gradient in of_step.items():
            path, _, last = name.rpartition(".")
            assert_row(seen.one(f"{path}:{last}.grad", step=step, backward=0), gradient)
    assert {row.backward for row in seen.rows} == {-1, 0}
    assert not seen.all("f:output.grad")  # those were of other points, in another order
    assert len(seen.all("first:output.grad")) == len(seen.all("last:output.grad")) == 4


def test_a_flow_alone_whose_model_is_first_called_without_grad() -> None:
    f = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(f.parameters(), lr=0.1)
    with collect(f) as seen:
        for _ in range(3):
            _Backwards.apply(f, torch.randn(5, 4), 3, *f.parameters()).sum().backward()
            optimizer.step()
    assert [event.moment.step for event in seen.events_of("loss")] == [0, 1, 2]
    rows = seen.all("self:weight.grad")
    assert [(row.step, row.calls, row.backward) for row in rows] == [(0, 1, 0), (1, 1, 0), (2, 1, 0)]
