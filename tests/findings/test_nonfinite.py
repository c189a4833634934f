"""Births of numbers that are not finite: from what a recording saw, and from rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from retrograd.facts.facts import SOURCES
from retrograd.findings.detectors.nonfinite import NanForward, NanUpdate
from retrograd.findings.explain import explain, explain_record
from retrograd.findings.finding import Finding
from retrograd.findings.record import Record
from retrograd.history.facts import NonFinite
from retrograd.history.history import History
from retrograd.history.sink import Moment
from retrograd.launch.live_findings import LiveFindings
from retrograd.recording.record import record
from retrograd.recording.recorder import Recorder
from tests.facts.births import (
    BAD_STEP,
    PROGRAMS,
    MaskedAttention,
    Program,
    Simple,
    masked_gradient,
    mse,
    safe_log,
    train,
)
from tests.facts.looking import line_of
from tests.findings.by_hand import ask, make_record

pytestmark = pytest.mark.filterwarnings("ignore:std")


def find(program: Program, sources: Sequence[Any] = SOURCES) -> list[Finding]:
    net = program.model()
    history = History()
    recorder = Recorder(net, history, sources=sources)
    recorder.attach()
    program.train(net)
    recorder.close()
    found = explain_record(Record(history, status="finished"))
    assert not [each for each in found.not_checked if each.reason.startswith("it failed")]
    return list(found)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_first_finding_is_the_birth(name: str) -> None:
    program = PROGRAMS[name]
    found = find(program)
    assert [each.severity for each in found[:1]] == ["critical"]
    first = found[0]
    assert first.detector == f"nan-{program.born}"
    assert first.step == BAD_STEP
    assert first.site == program.module
    assert first.line == line_of("# born", program.source)
    assert len([each for each in found if each.severity != "note"]) == 1, "it explains all that follows"


@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_alone_tell_step_and_kind(name: str) -> None:
    program = PROGRAMS[name]
    [first] = [each for each in find(program, ()) if each.severity != "note"]
    assert first.step == BAD_STEP
    assert first.detector == ("nan-forward" if program.born == "input" else f"nan-{program.born}")


def loss_of_numbers(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    return out.square().mean()


HEALTHY: dict[str, Any] = {
    "masks of −inf": (MaskedAttention, mse),
    "a log of 0 that nobody uses": (Simple, safe_log),
    "a gradient that is masked": (Simple, masked_gradient),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_said_of_what_is_masked(name: str) -> None:
    model, loss_of = HEALTHY[name]
    found = find(Program(model, lambda net: train(net, loss_of), "", "", "", "", None))
    assert not [each for each in found if each.detector.startswith("nan")]


def test_numbers_that_grow_to_infinity_are_the_fault_of_what_made_them_grow() -> None:
    def run(net: nn.Module) -> None:
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(net.parameters(), lr=30.0)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(torch.randn(16, 4)), torch.rand(16, 3)).backward()
            optimizer.step()

    class Straight(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    found = find(Program(Straight, run, "", "", "", "", None))
    assert found[0].detector == "learning-rate-too-high"
    assert not [each for each in found if each.detector.startswith("nan") and each.severity != "note"]


def test_an_overflow_that_is_cleared_before_the_update_is_none() -> None:
    def run(net: nn.Module) -> None:
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        for _ in range(6):
            for size in (1e3, 1e3, 0.0):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(net(torch.randn(16, 4) * size), torch.rand(16, 3))
                scaler.scale(loss).backward()
            assert all(bool(each.grad.isfinite().all()) for each in net.parameters() if each.grad is not None)
            scaler.step(optimizer)
            scaler.update()

    found = find(Program(Simple, run, "", "", "", "", None))
    assert not [each for each in found if each.detector.startswith("nan")]


def test_gradients_that_loss_scaling_skips_are_expected() -> None:
    def run(net: nn.Module) -> None:
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-60)
        for _ in range(12):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(torch.randn(16, 4) * 1e3), torch.rand(16, 3))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    found = find(Program(Simple, run, "", "", "", "", None))
    assert not [each for each in found if each.detector.startswith("nan")]


class Neighbours(nn.Module):
    """Means over neighbours, of an input that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, degree: torch.Tensor) -> torch.Tensor:
        total = x * (degree > 0)
        mean = total / degree  # born
        return self.fc(mean)


def train_neighbours(net: nn.Module) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(8):
        degree = torch.ones(6, 1)
        degree[2] = 0.0 if step == BAD_STEP else 1.0
        loss = net(torch.randn(6, 4), degree).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_what_is_made_without_a_graph_of_finite_inputs_does_not_come_in_with_them() -> None:
    [found] = find(Program(Neighbours, train_neighbours, "forward", "div", "", "self", Neighbours))
    assert (found.detector, found.step, found.site) == ("nan-forward", BAD_STEP, "self")
    assert found.line == line_of("# born", Neighbours)


def train_with_rewards(net: nn.Module, make: Any) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(8):
        count = 1 if step == BAD_STEP else 5
        reward = make(torch.arange(count, dtype=torch.float32))
        loss = (net(torch.randn(count, 4)).mean(1) * reward).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_what_comes_in_beside_the_inputs_is_not_said_to_be_the_data() -> None:
    def normalise(reward: torch.Tensor) -> torch.Tensor:
        return (reward - reward.mean()) / reward.std()

    [found] = find(Program(Simple, lambda net: train_with_rewards(net, normalise), "input", "mul", "", "", None))
    assert (found.step, found.detector) == (BAD_STEP, "nan-input")
    assert "beside the model's inputs, which are finite, at step 5, in what `mul` takes" in found.message
    assert "standard deviation of one element" in found.repair


def test_an_update_that_the_next_forward_shows() -> None:
    """Rows tell that the update of step 0 made it; it was seen being made of that, a step after."""
    seen = NonFinite(name="0", born="forward", operation="linear", moment=Moment(1, phase="forward"))
    updates = {0: np.array([np.nan, 1.0]), 1: np.array([np.nan, np.nan])}
    made = make_record(
        range(2), lambda step: {"0:weight.grad": np.ones(2), "0:weight.update": updates[step]}, [0.7, np.nan],
        facts=[seen],
    )  # fmt: skip
    assert [each.step for each in ask(NanUpdate, made)] == [0]
    assert not ask(NanForward, made)


def test_a_gradient_that_a_hand_spoils_behind_backward_is_one_fault_at_one_step() -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    history, told = History(), list[Finding]()
    recorder = Recorder(net, history, sources=SOURCES)
    LiveFindings(recorder.events, told.append)
    recorder.attach()
    try:
        for step in range(5):
            optimizer.zero_grad()
            net(torch.randn(6, 4)).square().mean().backward()
            if step == 2:
                assert net.weight.grad is not None
                net.weight.grad[0, 0] = float("nan")
            optimizer.step()
    finally:
        recorder.close()
    [found] = explain_record(Record(history))
    assert [(each.detector, each.site, each.step) for each in (*told, found)] == [("nan-update", "self:weight", 2)] * 2
    assert "by `SGD#1.step`, or by what is written by hand" in found.message
    assert ".grad behind backward" in found.repair


@pytest.mark.parametrize("beside", ["norm", "std", "log"])
def test_a_root_that_is_taken_between_two_looks_is_laid_to_nothing_else(beside: str) -> None:
    """``norm`` and ``std`` have a derivative of 0 where they are 0; what was noted before may not be what runs now."""
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    take = {"norm": lambda y: y.norm(dim=-1), "std": lambda y: y.std(-1), "log": lambda y: (y + 10).log()}[beside]
    with record(net) as recording:
        for step in range(90):
            y = net(torch.randn(8, 4))
            loss = y.square().mean() + 0.01 * take(y).mean()
            if step == 80:
                loss = loss + (y * 0).square().sum(-1).sqrt().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    [found] = explain(recording.history)
    assert (found.detector, found.step) == ("nan-backward", 80)
    assert "between self and the loss" in found.message
    assert "norm" not in found.message
    assert "std" not in found.message
    assert ("by `log` it seems, as operations were at step 0" in found.message) == (beside == "log")
