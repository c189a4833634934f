"""What is said of programs of which not every step was recorded: nothing that rests on a step that was not seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.core.history.curve import Curve
from retrograd.core.history.facts import Call, Gap
from retrograd.core.history.sink import Event, Moment
from retrograd.core.runs.findings import Findings
from retrograd.explaining.findings.detectors.loss import find_jump
from tests.explaining.findings.by_hand import check, make_record, spread
from tests.explaining.findings.programs import make_optimizer


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


class Heads(nn.Module):
    """A body with two heads, of which one call takes one; the third is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
        self.first, self.second, self.third = nn.Linear(32, 1), nn.Linear(32, 1), nn.Linear(32, 1)

    def forward(self, x: Tensor, task: int) -> Tensor:
        found: Tensor = (self.second if task else self.first)(self.body(x))
        return found


def train_heads(schedule: Any, *, steps: int = 200, period: int = 2, decay: float = 0.0) -> rg.Recording:
    torch.manual_seed(0)
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, weight_decay=decay)
    with rg.record(model, schedule=schedule) as recording:
        for step in range(steps):
            x = torch.randn(16, 8)
            loss = (model(x, step % period) - x[:, :1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return recording


def train_nets(schedule: Any, *, steps: int = 100) -> rg.Recording:
    """Two nets in turns, each with its optimizer, and so in steps of their own."""
    torch.manual_seed(4)
    first, second = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
    optimizers = torch.optim.SGD(first.parameters(), 0.01), torch.optim.Adam(second.parameters(), 0.01)
    with rg.record({"a": first, "b": second}, schedule=schedule) as recording:
        for _ in range(steps):
            for net, optimizer in zip((first, second), optimizers, strict=True):
                x = torch.randn(16, 6)
                optimizer.zero_grad()
                (net(x) - x.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
    return recording


def text_of(card: Any, topic: str) -> str:
    return "\n".join(f"{line.label} {line.text}" for line in card.lines if line.topic == topic)


def test_a_head_that_recorded_steps_always_miss_is_not_called_missing() -> None:
    recording = train_heads(10)
    [found] = rg.explain(recording).of("missing-gradient")
    assert "second" not in found.message
    assert found.message == (
        "third:bias and third:weight got a gradient at none of the 20 recorded of 200 steps and did not change from "
        "step 0 to step 200, while body.0:weight and 3 others did: third was not called at any of these."
    )
    assert found.severity == rg.explain(train_heads(1)).of("missing-gradient")[0].severity
    assert "never" not in str(found)
    said = text_of(rg.describe(recording), "parameters")
    assert "33 changed with no gradient at a recorded step (9 %: second)" in said
    assert "33 had no gradient at a recorded step (9 %: third)" in said
    assert "never" not in said
    assert "without a gradient" not in said


def test_nets_in_turns_of_which_one_is_always_missed_are_not_called_missing() -> None:
    recording = train_nets(10)
    assert not rg.explain(recording).of("missing-gradient")
    assert "the module was called at none of the 20 recorded of 200 steps" in text_of(
        rg.describe(recording), "left out"
    )
    assert "never" not in text_of(rg.describe(recording), "parameters")


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_zeros_at_recorded_steps_are_told_of_these(decay: float) -> None:
    """A product is zero at the recorded steps alone; with weight decay nobody knows whether others gave a gradient."""
    torch.manual_seed(0)
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, weight_decay=decay)
    with rg.record(model, schedule=10) as recording:
        for step in range(200):
            x = torch.randn(16, 8)
            made = model(x, 0) + (step % 2) * model(x, 1) + 0 * model.third(model.body(x))
            optimizer.zero_grad()
            (made - x[:, :1]).square().mean().backward()
            optimizer.step()
    found = rg.explain(recording).of("missing-gradient")
    assert all("never" not in each.message and "200 steps" in each.message for each in found)
    named = " ".join(each.message for each in found)
    assert "third" in named
    assert ("second" in named) == (decay > 0)
    assert all(each.severity == "note" for each in found)


class Sick(nn.Module):
    """A layer of units beside one that learns; they die at a step."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.fc, self.relu, self.out = nn.Linear(6, 1), nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.main(x) + 1e-2 * self.out(self.relu(self.fc(x)))
        return found


def train_until_death(every: int) -> rg.Recording:
    torch.manual_seed(0)
    model = Sick()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with rg.record(model, schedule=every) as recording:
        for step in range(400):
            x = torch.randn(32, 6)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True) - torch.randn(32, 1)).square().mean().backward()
            optimizer.step()
            if step == 153:
                with torch.no_grad():
                    model.fc.bias.fill_(-50)
    return recording


def test_units_that_died_between_two_recorded_steps_are_said_to_be_dead_since_the_second_at_the_latest() -> None:
    [found] = rg.explain(train_until_death(10)).of("dead-units")
    assert found.message == (
        "All units of relu (ReLU) have been zero for every sample that was seen since step 160 at the latest (not yet "
        "at step 150)."
    )
    [found] = rg.explain(train_until_death(1)).of("dead-units")
    assert found.message == "All units of relu (ReLU) have been zero for every sample since step 154."


class Budget:
    """The record of a run within a budget: losses and calls of each step, updates of every tenth."""

    STEPS = 60

    def __init__(self, ratio: float, rate: float) -> None:
        calls = [Call(name="step", about="SGD", details={"lr": [rate]}, moment=at(step)) for step in range(self.STEPS)]
        self.record = make_record(
            range(0, self.STEPS, 10),
            lambda step: {"0:weight.update": spread(ratio)},
            weights=lambda step: {"0:weight": 1.0},
            facts=[Gap(value=10.0, updates=10, moment=at(0)), make_optimizer("SGD", lr=rate), *calls],
        )
        for step in range(self.STEPS):
            self.record.history.add_event(Event(at(step), "loss", value=0.69))
        self.record.history.describe(schedule="within a budget of 5 %")


def at(step: int) -> Moment:
    return Moment(step, 0, -1)


def test_how_far_updates_moved_the_weights_counts_those_that_were_not_recorded() -> None:
    assert not check("learning-rate-too-low", Budget(3e-4, 1e-5).record)
    [found] = check("learning-rate-too-low", Budget(1e-5, 1e-5).record)
    assert "60 updates, 6 recorded, moved the weights by about " in found.message


@pytest.mark.parametrize("every", [1, 7, 10])
def test_forwards_are_counted_in_all_steps_that_were_made(every: int) -> None:
    card = rg.describe(train_heads(every, steps=96))
    assert text_of(card, "modes").strip() == "96 forwards in training mode with grad; never called without grad"


@pytest.mark.parametrize("every", [1, 10])
def test_nets_in_turns_are_called_in_as_many_steps_as_they_are(every: int) -> None:
    card = rg.describe(train_nets(every, steps=48))
    assert "48 forwards in training mode with grad; never called without grad" in text_of(card, "modes")


def fail_at(step: int, every: int) -> Findings:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with pytest.raises(KeyError), rg.record(model, "runs/failed", schedule=every):
        for number in range(20):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            if number == step:
                raise KeyError("OUT")
    return rg.explain("runs/failed")


@pytest.mark.parametrize("every", [1, 10])
def test_a_run_that_died_did_so_at_the_step_that_was_made_last(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [found] = fail_at(17, every).of("failed")
    assert found.step == 17
    assert "died at step 17" in found.message
