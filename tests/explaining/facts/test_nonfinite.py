"""Where numbers that are not finite are made: held against the programs' own source."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from retrograd.core.history.facts import NonFinite, read_facts
from retrograd.core.history.history import History
from retrograd.core.recording.fact_source import MakeSource
from retrograd.core.recording.recorder import Recorder
from retrograd.explaining.facts.nonfinite_watch import NonFiniteWatch
from retrograd.explaining.facts.sources import SOURCES
from retrograd.explaining.facts.watches import WATCHES
from tests.explaining.facts.births import (
    BAD_STEP,
    PROGRAMS,
    MaskedAttention,
    Program,
    Simple,
    masked_gradient,
    mse,
    safe_log,
    train,
)  # fmt: skip
from tests.explaining.facts.looking import line_of


def record(program: Program, sources: Sequence[MakeSource] = (NonFiniteWatch,)) -> list[NonFinite]:
    net = program.model()
    history = History()
    recorder = Recorder(net, history, sources=sources)
    recorder.attach()
    try:
        program.train(net)
    finally:
        recorder.close()
    assert not [event for event in history.events if event.kind == "fault"]
    return [fact for fact in read_facts(history.events) if isinstance(fact, NonFinite)]


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_watched_program_tells_operation_line_and_reason(name: str) -> None:
    program = PROGRAMS[name]
    [found] = record(program)
    assert found.step == BAD_STEP
    assert found.born == program.born
    assert found.operation == program.operation
    assert program.reason in found.reason
    assert found.line == line_of("# born", program.source)
    assert found.name == program.module


class DividesLate(nn.Module):
    """It divides by 0 from a step on that no sampled step is like."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.calls = nn.Linear(4, 4), nn.Linear(4, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        self.calls += 1
        h = h / (h.sum() * 0 if self.calls > BAD_STEP else 1.0)  # born
        return self.last(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("sources", "name", "line"),
    [(SOURCES, "", ""), ((*SOURCES, *WATCHES), "self", line_of("# born", DividesLate))],
    ids=["sampled", "watched"],
)
def test_what_was_watched_is_told_alone_and_what_no_sample_had_has_no_line(
    sources: Sequence[MakeSource], name: str, line: str
) -> None:
    program = Program(DividesLate, lambda net: train(net, mse), "", "", "", "", None)
    [found] = record(program, sources)
    assert (found.step, found.operation, found.reason) == (BAD_STEP, "div", "division by 0")
    assert (found.name, found.line, found.watched) == (name, line, bool(line))


HEALTHY: dict[str, Any] = {
    "masks of −inf": (MaskedAttention, mse),
    "a log of 0 that nobody uses": (Simple, safe_log),
    "a gradient that is masked": (Simple, masked_gradient),
    "nothing special": (Simple, mse),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_masked_is_not_told(name: str) -> None:
    model, loss_of = HEALTHY[name]
    program = Program(model, lambda net: train(net, loss_of), "", "", "", "", None)
    assert record(program) == []


def test_an_overflow_that_loss_scaling_skips_is_expected() -> None:
    def run(net: nn.Module) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, backoff_factor=2.0**-60, enabled=True)
        for _ in range(6):
            loss = net(torch.randn(6, 4) * 1e6).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    assert record(Program(Simple, run, "", "", "", "", None)) == []


def test_a_program_that_stops_at_nan_is_told_of() -> None:
    def run(net: nn.Module) -> None:
        for step in range(3):
            loss = (net(torch.ones(6, 4)) * step).log().mean()
            if torch.isnan(loss) or torch.isinf(loss):
                break
            loss.backward()

    [found] = record(Program(Simple, run, "", "", "", "", None))
    assert (found.operation, found.step) == ("log", 0)


class Root(torch.autograd.Function):
    """A square root whose derivative at 0 its author has forgotten."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        root = x.clamp(min=0).sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (root,) = ctx.saved_tensors
        half = gradient * 0.0
        return half / root  # born backward


class Logarithm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.log()  # born forward

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient / ctx.saved_tensors[0]


@pytest.mark.parametrize(
    ("function", "born", "operation", "mark"),
    [(Root, "backward", "div", "# born backward"), (Logarithm, "forward", "log", "# born forward")],
)
def test_a_function_of_the_program_is_looked_into(
    function: type[torch.autograd.Function], born: str, operation: str, mark: str
) -> None:
    def run(net: nn.Module) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for step in range(8):
            out = net(torch.randn(6, 4))
            out = out - out.detach().max()
            loss = (function.apply(out) if step == 5 else out).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    [found] = record(Program(Simple, run, "", "", "", "", None))
    assert (found.born, found.operation, found.step) == (born, operation, 5)
    assert found.line == line_of(mark, function)


class Scaled(Simple):
    """Its nodes hold numbers, which a mode is given as numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2.0 / 3.0  # type: ignore[no-any-return]


def train_watched(model: type[nn.Module], *, is_watched: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = model()
    history, recorder = History(), None
    if is_watched:
        recorder = Recorder(net, history, sources=(*SOURCES, *WATCHES))
        recorder.attach()
    train(net, mse, torch.optim.AdamW(net.parameters(), lr=0.01))
    if recorder is not None:
        recorder.close()
    assert not [event for event in history.events if event.kind == "fault"]
    return [*(each.detach() for each in net.parameters()), torch.rand(1)]


@pytest.mark.parametrize("model", [Simple, Scaled, MaskedAttention])
def test_watching_changes_nothing(model: type[nn.Module]) -> None:
    bare, watched = (train_watched(model, is_watched=each) for each in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))


class Exponential(torch.autograd.Function):
    """A Function of the program's own, whose backward is looked into."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(result := x.exp())
        return result.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (result,) = ctx.saved_tensors
        return gradient * result


def test_passes_that_are_watched_hold_no_graph_until_the_collector_comes() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    recorder = Recorder(net, History(), sources=(*SOURCES, *WATCHES))
    recorder.attach()
    losses: list[weakref.ref[torch.Tensor]] = []
    try:
        for step in range(6):
            if step == 3:
                gc.collect()
                gc.disable()
            loss = Exponential.apply(net(torch.ones(2, 3))).sum()
            losses.append(weakref.ref(loss))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        del loss
        net(torch.ones(2, 3))  # notes end with the step
        assert [each() for each in losses] == [None] * 6
    finally:
        gc.enable()
        recorder.close()
