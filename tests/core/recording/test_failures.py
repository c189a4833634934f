"""Exceptions in the middle of a step: the next one is recorded as if nothing had been. Faults of ours harm nobody."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.errors import RetrogradWarning
from retrograd.core.recording.optimizer_watch import UpdateRecorder
from retrograd.core.recording.site_recorder import TensorRecorder
from retrograd.core.statistics.slab import UnreadableTensorError
from tests.core.recording.collector import Collector, collect
from tests.core.recording.oracle import assert_row, listen


class Fuse(nn.Module):
    """Hands on its input, and raises in forward or backward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_error: BaseException | None = None
        self.backward_error: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.forward_error is not None:
            raise self.forward_error
        out = x * 2

        def check(gradient: torch.Tensor) -> None:
            if self.backward_error is not None:
                raise self.backward_error

        out.register_hook(check)
        return out


def make_net() -> tuple[nn.Sequential, Fuse, torch.optim.Optimizer]:
    torch.manual_seed(0)
    fuse = Fuse()
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), fuse, nn.Linear(4, 1))
    return net, fuse, torch.optim.SGD(net.parameters(), lr=0.1)


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()


PATHS = ("0", "1", "2", "3", "self")
ERRORS = [ValueError("fuse"), KeyboardInterrupt(), SystemExit(3)]


@pytest.fixture
def error(request: pytest.FixtureRequest) -> Iterator[BaseException]:
    """One of them, which holds no frames of the test once that is over: these hold the model, and that its hooks."""
    error = type(request.param)(*request.param.args)
    yield error
    error.__traceback__ = None


@pytest.mark.parametrize("error", ERRORS, indirect=True)
@pytest.mark.parametrize("sites", [None, ["*:output*", "*:input*"]], ids=["default", "inputs"])
def test_an_exception_in_forward(error: BaseException, sites: Any) -> None:
    net, fuse, optimizer = make_net()
    with collect(net, sites=sites) as seen:
        train(net, optimizer)
        fuse.forward_error = error
        with pytest.raises(type(error)):
            train(net, optimizer)
        fuse.forward_error = None
        with listen(net) as oracle:
            train(net, optimizer)
    failed = [row for row in seen.rows if row.phase == "failed" and "output" in row.site]
    assert [row.site for row in failed] == ["0:output", "1:output"]
    assert {row.step for row in failed} == {1}
    check_step(seen, oracle, step=1)


def check_step(seen: Collector, oracle: Any, step: int) -> None:
    """A step was recorded as hooks saw it."""
    for path in PATHS:
        [value], [[gradient]] = oracle.values[path], oracle.gradients[path]
        assert_row(seen.one(f"{path}:output", step=step, phase="train"), value)
        assert_row(seen.one(f"{path}:output.grad", step=step, phase="train"), gradient)
        assert f"{path}#2:output" not in seen.names
    assert not seen.facts["faults"]


@pytest.mark.parametrize("error", ERRORS, indirect=True)
@pytest.mark.parametrize("sites", [None, ["*:output*", "*:input*"]], ids=["default", "inputs"])
def test_an_exception_in_backward(error: BaseException, sites: Any) -> None:
    net, fuse, optimizer = make_net()
    with collect(net, sites=sites) as seen:
        train(net, optimizer)
        fuse.backward_error = error
        with pytest.raises(type(error)):
            train(net, optimizer)
        fuse.backward_error = None
        with listen(net) as oracle:
            train(net, optimizer)
    failed = [row.site for row in seen.rows if row.phase == "failed" and "output" in row.site]
    assert set(failed) == {*(f"{path}:output" for path in PATHS), "3:output.grad", "self:output.grad"}
    check_step(seen, oracle, step=1)
    trained = {(row.step, row.micro) for row in seen.rows if row.phase == "train" and row.step == 1}
    assert trained == {(1, 1)}


def test_ctrl_c_in_a_model_that_is_never_called_again() -> None:
    net, fuse, _ = make_net()
    other, _, optimizer = make_net()
    with collect({"a": net, "b": other}) as seen:
        fuse.forward_error = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            net(torch.randn(5, 3))
        for _ in range(2):
            train(other, optimizer)
    assert [row.site for row in seen.rows if row.phase == "failed"] == ["a.0:output", "a.1:output"]
    assert [(row.step, row.phase) for row in seen.all("b.0:output.grad")] == [(0, "train"), (1, "train")]


def test_an_exception_that_the_model_catches_is_none() -> None:
    class Fallback(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.risky, self.safe = Fuse(), nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.risky(x)
            except ValueError:
                return self.safe(x)

    net = Fallback()
    net.risky.forward_error = ValueError("fuse")
    with collect(net, sites=["*:output*", "*:input*"]) as seen:
        net(torch.randn(2, 3)).sum().backward()
    assert {row.phase for row in seen.rows} == {"train"}
    assert {"safe:output.grad", "self:output.grad", "risky:input.x"} <= set(seen.sites())


def test_a_model_that_calls_itself_is_no_ctrl_c() -> None:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
            return x if depth == 0 else self(self.fc(x), depth - 1)

    net = Tree()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with collect(net, sites="*:output*") as seen:
        for _ in range(2):
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert {(row.step, row.phase, row.calls) for row in seen.rows} == {(0, "train", 1), (1, "train", 1)}
    assert len(seen.rows) == 2 * 2 * (3 + 4)


# ---- faults of ours -------------------------------------------------------------------------------------------


def test_a_statistic_that_raises_stops_nothing_and_is_said_once() -> None:
    net, _, optimizer = make_net()

    def fragile(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape != (4, 8):
            raise ValueError("I know one shape only")
        return tensor.sum()

    with (
        collect(net, statistics=[fragile]) as seen,
        pytest.warns(RetrogradWarning, match="I know one shape only") as said,
    ):
        for _ in range(2):
            with listen(net) as oracle:
                train(net, optimizer)
    assert len(said) == 1
    check = {path: oracle.values[path][0] for path in PATHS}
    for path, value in check.items():
        assert_row(seen.one(f"{path}:output", step=1), value)
        assert_row(seen.one(f"{path}:output.grad", step=1), oracle.gradients[path][0][0])
    assert seen.facts["faults"]["0:output"] == 2
    faults = seen.events_of("fault")
    assert len({event.name for event in faults}) == len(faults)
    assert all("I know one shape only" in event.text for event in faults)


def test_where_warnings_are_errors_a_fault_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    net, _, optimizer = make_net()

    def fragile(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape != (4, 8):
            raise ValueError("I know one shape only")
        return tensor.sum()

    with collect(net, statistics=[fragile]):
        train(net, optimizer)
    assert capsys.readouterr().err.count("RetrogradWarning: retrograd could not record") == 1


BROKEN = [
    "clock.forward_begins", "clock.forward_ends", "clock.enter_backward", "clock.leave_backward", "clock.end_step",
    "_steps.update_begins", "_steps.ends_step", "_sink.add_rows", "_sink.add_event", "_factory.make_site_recorder",
]  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_whatever_breaks_in_the_recorder_training_goes_on(name: str) -> None:
    def run(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        torch.manual_seed(1)
        for _ in range(3):
            train(net, optimizer)
        return [parameter.detach().clone() for parameter in net.parameters()]

    net, _, optimizer = make_net()
    recording = rg.record(net)
    *path, last = name.split(".")
    owner = functools.reduce(getattr, path, recording._recorder)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RetrogradWarning)
        patch.setattr(type(owner), last, lambda *args, **kwargs: 1 / 0)
        weights = run(net, optimizer)
    recording.close()
    net, _, optimizer = make_net()
    assert all(map(torch.equal, weights, run(net, optimizer)))


def test_what_was_being_done_is_never_taken_for_a_site(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise UnreadableTensorError("it lies elsewhere")

    net, _, optimizer = make_net()
    monkeypatch.setattr(UpdateRecorder, "begin", refuse)
    with warnings.catch_warnings(), collect(net) as seen:
        warnings.simplefilter("ignore", RetrogradWarning)
        train(net, optimizer)
    assert {item["site"] for item in seen.facts["not_recorded"]}.isdisjoint(seen.facts["faults"])
    assert seen.facts["faults"] == {"OptimizerWatch.update_begins": 1}


def test_a_weight_that_cannot_be_read_keeps_no_other_from_being_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    net, _, optimizer = make_net()
    see = TensorRecorder.see

    def refuse_one(tensor_recorder: TensorRecorder, tensor: torch.Tensor) -> None:
        if tensor_recorder.name == "0:weight":
            raise UnreadableTensorError("it lies elsewhere")
        see(tensor_recorder, tensor)

    monkeypatch.setattr(TensorRecorder, "see", refuse_one)
    with collect(net, sites=["*:weight", "*:bias", "*:parameters.update"]) as seen:
        train(net, optimizer)
    assert {"0:bias", "0:weight.update", "0:bias.update"} <= set(seen.sites())
    assert {"site": "0:weight", "reason": "it lies elsewhere"} in seen.facts["not_recorded"]
