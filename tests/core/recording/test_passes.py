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


def test_micro_batches_are_numbered() -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with listen(net) as oracle, collect(net) as seen:
        for _ in range(2):
            for _ in range(3):
                net(torch.randn(2, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for path in PATHS:
        for call, (value, [gradient]) in enumerate(zip(oracle.values[path], oracle.gradients[path], strict=True)):
            where = {"step": call // 3, "micro": call % 3}
            assert_row(seen.one(f"{path}:output", **where), value)
            assert_row(seen.one(f"{path}:output.grad", backward=0, **where), gradient)
    losses = [(event.moment.step, event.moment.micro) for event in seen.events_of("loss")]
    assert losses == [(step, micro) for step in range(2) for micro in range(3)]


def test_passes_over_a_retained_graph_are_numbered() -> None:
    net = make_net()
    with listen(net) as oracle, collect(net) as seen:
        out = net(torch.randn(5, 3))
        out.sum().backward(retain_graph=True)
        out.square().sum().backward(retain_graph=True)
        torch.autograd.grad(out.exp().sum(), list(net.parameters()))
    for path in PATHS:
        assert_row(seen.one(f"{path}:output"), oracle.values[path][0])
        assert len(oracle.gradients[path][0]) == 3
        for backward, gradient in enumerate(oracle.gradients[path][0]):
            assert_row(seen.one(f"{path}:output.grad", backward=backward), gradient)
    assert [event.moment.backward for event in seen.events_of("loss")] == [0, 1, 2]


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


def test_backward_from_parts_of_the_output() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = self.trunk(x)
            return self.left(h), self.right(h)

    net = Heads()
    with listen(net) as oracle, collect(net) as seen:
        left, right = net(torch.randn(4, 3))
        left.sum().backward(retain_graph=True)
        right.square().sum().backward()
    assert [row.backward for row in seen.all("left:output.grad")] == [0]
    assert [row.backward for row in seen.all("right:output.grad")] == [1]
    for backward in (0, 1):
        assert_row(seen.one("trunk:output.grad", backward=backward), oracle.gradients["trunk"][0][backward])


def test_a_pass_within_a_forward_is_part_of_its_micro_batch() -> None:
    class Forces(nn.Module):
        """An energy whose slope is the output."""

        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            (slope,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
            return -slope

    torch.manual_seed(0)
    net = Forces()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with listen(net) as oracle, collect(net) as seen:
        for _ in range(2):
            net(torch.randn(5, 3)).square().sum().backward()
            optimizer.step()
    assert {(row.step, row.micro) for row in seen.rows} == {(0, 0), (1, 0)}
    for step in range(2):
        for path in ("self", "energy", "energy.0"):
            assert_row(seen.one(f"{path}:output", step=step), oracle.values[path][step])
        assert_row(seen.one("self:output.grad", step=step, backward=1), oracle.gradients["self"][step][0])
        for backward in (0, 1):
            gradient = oracle.gradients["energy.0"][step][backward]
            assert_row(seen.one("energy.0:output.grad", step=step, backward=backward), gradient)


def test_a_pass_that_starts_elsewhere_is_seen_too() -> None:
    """Who calls the engine itself, as compiled extensions do, tells nobody where a pass begins and ends."""

    def backward(loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        engine = torch.autograd.Variable._execution_engine
        engine.run_backward((loss,), (torch.ones(()),), retain_graph, False, (), True, True)

    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with listen(net) as oracle, collect(net) as seen:
        for _ in range(2):
            out = net(torch.randn(5, 3)).sum()
            backward(out, retain_graph=True)
            backward(out)
            optimizer.step()
    for path in PATHS:
        for step in range(2):
            for number in range(2):
                row = seen.one(f"{path}:output.grad", step=step, micro=0, backward=number)
                assert_row(row, oracle.gradients[path][step][number])


def test_backward_of_somebody_elses_graph_changes_nothing() -> None:
    net, other = make_net(), make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    stranger = torch.optim.SGD(other.parameters(), lr=0.1)
    with collect(net) as seen:
        for _ in range(2):
            out = net(torch.randn(5, 3))
            other(torch.randn(5, 3)).sum().backward()
            stranger.step()
            out.sum().backward()
            optimizer.step()
    assert {(row.step, row.micro, row.phase) for row in seen.rows} == {(0, 0, "train"), (1, 0, "train")}
    assert len(seen.events_of("loss")) == 2


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


def test_a_hook_that_runs_a_backward_of_its_own_is_no_pass_of_ours() -> None:
    net = make_net()
    with collect(net) as seen:
        out = net(torch.randn(5, 3))

        def inner(gradient: torch.Tensor) -> None:
            with torch.enable_grad():
                side = torch.ones(1, requires_grad=True)
                (side * 2).sum().backward()

        out.register_hook(inner)
        out.sum().backward()
    assert {(row.micro, row.backward) for row in seen.rows if row.backward >= 0} == {(0, 0)}


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
