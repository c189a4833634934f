"""Gradients that are exactly zero in all steps: which operation is named, and what is let be; by whole trainings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.explain import explain
from tests.explaining.facts.looking import line_of

Loss = Callable[[Tensor, Tensor, int], Tensor]
NEVER = torch.zeros(32, 1, dtype=torch.bool)


def clamped(out: Tensor, y: Tensor, step: int) -> Tensor:
    return ((out + 9).clamp(0, 1) - y).abs().mean()  # here


def rounded(out: Tensor, y: Tensor, step: int) -> Tensor:
    return (out.sigmoid().round() - y).square().mean()  # here


def dead(out: Tensor, y: Tensor, step: int) -> Tensor:
    return (torch.relu(out - 9) - y).square().mean()  # here


def masked(out: Tensor, y: Tensor, step: int) -> Tensor:
    return (torch.where(NEVER, out, y) - 2 * y).square().mean()  # here


def weightless(out: Tensor, y: Tensor, step: int) -> Tensor:
    return 0 * (out - y).square().mean()  # here


def against_itself(out: Tensor, y: Tensor, step: int) -> Tensor:
    old = out * 2  # here
    ratio = (out * 2 - old).exp()
    return (ratio * y).mean()


def saturated(out: Tensor, y: Tensor, step: int) -> Tensor:
    return (torch.sigmoid(out * 1e3 + 1e5) - y).square().mean()  # here


def warmed_up(out: Tensor, y: Tensor, step: int) -> Tensor:
    return float(step >= 6) * (out - y).square().mean()


def satisfied(out: Tensor, y: Tensor, step: int) -> Tensor:
    return (out - 9).clamp(min=0).mean()


def bounded(out: Tensor, y: Tensor, step: int) -> Tensor:
    return ((out + 0.5).clamp(0, 1) - y).abs().mean()


def train(loss_of: Loss, steps: int = 8) -> list[Finding]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with rg.record(net) as recording:
        for step in range(steps):
            x = torch.rand(32, 4)
            loss = loss_of(net(x), x[:, :1], step)
            optimizer.zero_grad()
            loss.backward()
            # the oracle of this file
            assert any(each.grad is not None and each.grad.any() for each in net.parameters()) is (
                loss_of is bounded or (loss_of is warmed_up and step >= 6)
            )
            optimizer.step()
    assert not [event for event in recording.history.events if event.kind == "fault"]
    return explain(recording.history).of("zero-gradient")


@pytest.mark.parametrize(
    ("loss_of", "words"),
    [
        (clamped, "lies outside of its bounds (0, 1)"),
        (rounded, "`round`"),
        (dead, "`relu`"),
        (masked, "`where`"),
        (weightless, "by zero"),
        (against_itself, "add up to exactly zero"),
        (saturated, "`sigmoid`"),
    ],
)
def test_the_operation_behind_it_is_named(loss_of: Loss, words: str) -> None:
    (found,) = train(loss_of)
    assert found.severity == "critical"
    assert words in found.message
    assert "of all parameters are exactly zero in all of 8 recorded steps" in found.message
    assert found.line == line_of("# here", loss_of)


@pytest.mark.parametrize("loss_of", [warmed_up, satisfied, bounded])
def test_it_is_silent_about(loss_of: Loss) -> None:
    assert not train(loss_of)


def test_one_of_two_optimizers() -> None:
    torch.manual_seed(0)
    actor, critic = nn.Linear(3, 2), nn.Linear(5, 1)
    optimizers = [torch.optim.Adam(each.parameters()) for each in (actor, critic)]
    with rg.record({"actor": actor, "critic": critic}) as recording:
        for _ in range(8):
            state = torch.randn(16, 3)
            value = critic(torch.cat([state, actor(state).sign()], 1))
            for optimizer in optimizers:
                optimizer.zero_grad()
            (value - state.sum(1, keepdim=True)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    (found,) = explain(recording.history).of("zero-gradient")
    assert "actor:bias and actor:weight" in found.message
    assert found.site == "actor"
    assert "`sign`" in found.message


def test_following_a_pass_leaves_gradients_as_they_are() -> None:
    def gradients(is_recorded: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        nn.init.zeros_(net[2].weight)  # so the first layer gets zeros at first, and its pass is followed
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        found: list[Tensor] = []
        recording = rg.record(net) if is_recorded else None
        for _ in range(5):
            optimizer.zero_grad()
            net(torch.randn(16, 4)).square().sum().backward()
            found += [each.grad.clone() for each in net.parameters() if each.grad is not None]
            optimizer.step()
        if recording is not None:
            recording.close()
        return found

    assert all(map(torch.equal, gradients(is_recorded=True), gradients(is_recorded=False)))
