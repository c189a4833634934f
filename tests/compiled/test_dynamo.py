"""Calls of modules that are traced in short: what they do is what torch does, and torch is as it was afterwards."""

from __future__ import annotations

import gc
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import retrograd as rg
from retrograd.compiled import dynamo
from retrograd.core.errors import RetrogradWarning
from retrograd.core.hooks.compiled import when_loaded
from retrograd.core.hooks.listeners import replace


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        return {"first": self.first(x) * scale, "second": self.second(x)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair, self.last = Pair(), nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        found = self.pair(x, scale=2.0)
        out: Tensor = self.last(found["first"] + found["second"])
        return out


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of the modules that were traced in short."""
    names: list[str] = []
    trace = dynamo._trace_call

    def note(room: Any, variable: Any, *args: Any) -> Any:
        names.append(type(variable.value).__name__)
        return trace(room, variable, *args)

    monkeypatch.setattr(dynamo, "_trace_call", note)
    torch._dynamo.reset()
    return names


def run(net: nn.Module, call: Any) -> dict[str, float]:
    """The root mean square of every output and gradient that is recorded in one step, and that of the result."""
    net.zero_grad()
    with rg.record(net) as recording:
        result = call(torch.arange(6.0).reshape(2, 3))
        result.sum().backward()
    found = {str(site): recording.history[site].rms[-1] for site in recording.history.sites}
    return {**found, "result": result.square().mean().sqrt().item()}


def test_a_net_is_recorded_as_in_eager_code_and_torch_is_put_back(traced: list[str]) -> None:
    torch.manual_seed(0)
    net = Net()
    eager = run(net, net)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    assert run(net, compiled) == pytest.approx(eager)
    assert sorted(traced) == ["Linear", "Linear", "Linear", "Pair", "ReLU", "Sequential"]

    del net, compiled
    torch._dynamo.reset()
    gc.collect()
    room: Any = torch._dynamo.variables.nn_module
    assert room.UnspecializedNNModuleVariable.call_function.__module__ == room.__name__
    assert not hasattr(room.UnspecializedNNModuleVariable.call_function, "__wrapped__")


def test_other_hooks_are_left_to_torch_and_found_when_they_come_later(traced: list[str]) -> None:
    torch.manual_seed(0)
    net = Net()
    net.pair.first.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    net.last.forward = lambda x: nn.Sequential.forward(net.last, x * 3)  # type: ignore[method-assign]
    compiled = torch.compile(net, backend="aot_eager")
    assert run(net, compiled) == pytest.approx(run(net, net))
    assert sorted(traced) == ["Linear", "Linear", "Pair", "ReLU"]

    net.pair.second.register_forward_hook(lambda module, args, output: output * 5)
    assert run(net, compiled) == pytest.approx(run(net, net))


def test_a_like_net_that_is_not_recorded_has_a_graph_of_its_own(traced: list[str]) -> None:
    nets = [nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(2)]
    calls = [torch.compile(net, backend="aot_eager") for net in nets]
    with rg.record(nets[0]) as recording:
        update = torch.optim.SGD(nets[0].parameters(), lr=0.1)
        for _ in range(3):
            for call in calls:
                call(torch.ones(2, 3)).sum().backward()
            update.step()
    assert recording.history["0:output.grad"].steps.tolist() == [0, 1, 2]


def test_recordings_that_follow_each_other_share_two_graphs(traced: list[str]) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    call = torch.compile(net, backend="aot_eager")
    counters.clear()
    for _ in range(4):
        with rg.record(net) as recording:
            call(torch.ones(2, 3)).sum().backward()
        assert recording.history["0:output.grad"].steps.tolist() == [0]
        call(torch.ones(2, 3)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 2  # with the hooks around the model, and without


def test_hooks_that_were_put_first_are_told_apart(traced: list[str]) -> None:
    """Each of two recordings puts its own before all others: tables and the dictionaries below have other orders."""
    net = nn.Linear(3, 3)
    with rg.record(net, sites="*"), rg.record(net) as recording:
        torch.compile(lambda x: net(x).sum(), backend="aot_eager")(torch.ones(2, 3)).backward()
    assert traced
    assert len(recording.history["self:output.grad"].rms) == 1


@pytest.mark.parametrize("name", ["torch._dynamo.guards", "retrograd_loaded_later"])
def test_a_torch_without_what_is_looked_for_is_told_and_left_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "retrograd_loaded_later.py").write_text("there = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(RetrogradWarning, match=f"has another {name} than retrograd knows"):
        undo = when_loaded(name, lambda room: replace(room, "not_there", None))
        room = importlib.import_module(name)
    undo()
    assert not hasattr(room, "not_there")
