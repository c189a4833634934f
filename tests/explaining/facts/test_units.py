"""Units of activations: what is zero, saturated or looked up, held against numpy on outputs that hooks have kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import retrograd as rg
from retrograd.core.history.facts import Units
from tests.explaining.facts.looking import facts_of


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.last = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.relu(self.first(x)))


class Called(Plain):
    """Its activation is called as a function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.first(x)))


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.line, self.last = nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv1d(6, 5, 3), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.conv(x.view(-1, 1, 5, 5)))
        return self.last(F.relu(self.line(x.flatten(2))).mean(2))


def train(
    net: nn.Module,
    steps: int,
    columns: int,
    change: Callable[[int], None] = lambda step: None,
    compile_: Callable[[nn.Module], Any] = lambda net: net,
) -> list[Units]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    call = compile_(net)
    recording = rg.record(net)
    for step in range(steps):
        change(step)
        call(torch.randn(10, columns)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    recording.close()
    return facts_of(recording, Units)


@pytest.mark.parametrize("kind", [Plain, Called])
def test_units_that_die_are_dead_since_then(kind: type[Plain]) -> None:
    torch.manual_seed(0)
    net = kind()

    def change(step: int) -> None:
        with torch.no_grad():
            net.first.bias[:2] = -1000.0  # from the first step on
            if step >= 20:
                net.first.bias[2:5] = -1000.0

    looks = train(net, 130, 4, change)
    assert {look.name for look in looks} == {"relu:output" if kind is Plain else "first:output"}
    by_step = {look.step: look for look in looks}
    assert [*by_step] == [0, 1, 2, 3, 16, 32, 48, 64, 80, 96, 112, 128][kind is Called :]  # it is known from step 0 on
    first = 0 if kind is Plain else 1
    assert {look.value for look in looks} == {8.0}
    assert {look.samples for look in looks} == {10}
    assert (by_step[16].always, by_step[16].since) == (2, first)
    assert by_step[128].always == 5
    assert by_step[128].since == 32
    assert by_step[128].zero == 5


def test_what_is_zero_is_what_numpy_says() -> None:
    net, outputs = Plain(), []
    net.relu.register_forward_hook(lambda module, args, output: outputs.append(output.detach().numpy().copy()))
    looks = train(net, 40, 4)
    assert looks
    for look in looks:
        assert look.zero == np.count_nonzero((outputs[look.step] == 0).all(0))


def test_units_of_convolutions_are_their_channels() -> None:
    net, values = Convolved(), []
    net.line.register_forward_hook(lambda module, args, output: values.append(output.detach().numpy().copy()))
    with torch.no_grad():
        net.line.bias[:] = torch.tensor([-100.0, 0, 0, 0, 0])
    looks = train(net, 3, 25)
    line = [look for look in looks if look.name == "line:output"]
    assert [look.step for look in line] == [1, 2]
    for look in line:
        assert (look.value, look.samples) == (5, 10 * values[0].shape[2])
        assert look.zero == np.count_nonzero((values[look.step] <= 0).all((0, 2))) >= 1
    assert {(look.value, look.samples) for look in looks if look.name == "relu:output"} == {(6, 90)}


@pytest.mark.parametrize(("activation", "low", "high"), [(nn.Tanh(), -0.99, 0.99), (nn.Sigmoid(), 0.01, 0.99)])
def test_saturated_units_are_those_of_which_most_elements_are_at_the_bounds(
    activation: nn.Module, low: float, high: float
) -> None:
    net, outputs = nn.Sequential(nn.Linear(4, 8), activation, nn.Linear(8, 2)), []
    with torch.no_grad():
        net[0].weight *= torch.linspace(0.1, 200, 8)[:, None]
    activation.register_forward_hook(lambda module, args, output: outputs.append(output.detach().numpy().copy()))
    looks = train(net, 2, 4)
    for look in looks:
        share = ((outputs[look.step] < low) | (outputs[look.step] > high)).mean(0)
        assert look.saturated == np.count_nonzero(share > 0.5) > 0
        assert look.zero == look.always == 0


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the compiler's own
@pytest.mark.parametrize("is_compiled", [False, True])
def test_rows_of_an_embedding_that_were_looked_up(is_compiled: bool) -> None:
    net = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 1))
    call = torch.compile(net, backend="aot_eager", fullgraph=True) if is_compiled else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    recording = rg.record(call)
    seen: set[int] = set()
    counts = []
    torch.manual_seed(0)
    for step in range(20):
        rows = torch.randint(0, 30, (4, 3))
        seen |= set(rows.flatten().tolist())
        call(rows).mean().backward()
        optimizer.step()
        if step in (0, 1, 2, 3, 16):
            counts.append(len(seen))
    with torch.no_grad():
        call(torch.full((1, 1), 49))  # not trained with
    recording.close()
    looks = facts_of(recording, Units)
    assert [look.used for look in looks] == counts
    assert [look.samples for look in looks] == [12, 12, 12, 12, 13 * 12]
    assert {(look.name, look.value) for look in looks} == {("0:output", 50.0)}


def test_nothing_changes() -> None:
    def run(is_recorded: bool) -> list[Any]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(8, 2), nn.Tanh())
        optimizer = torch.optim.Adam(net.parameters())
        recording = rg.record(net) if is_recorded else None
        for _ in range(5):
            net(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()
        if recording is not None:
            recording.close()
        return [each.detach() for each in net.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(run(False), run(True), strict=True))


class Bounded(Plain):
    """A tanh beside a ReLU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.relu(self.tanh(self.first(x))))

    def __init__(self) -> None:
        super().__init__()
        self.tanh = nn.Tanh()


def in_place(net: nn.Module) -> nn.Module:
    net.compile(backend="aot_eager")
    return net


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the compiler's own
@pytest.mark.parametrize("compile_", [lambda net: torch.compile(net, backend="aot_eager", fullgraph=True), in_place])
def test_inside_compiled_code_modules_are_looked_at_as_in_eager_code(compile_: Callable[[nn.Module], Any]) -> None:
    def find(compile_: Callable[[nn.Module], Any]) -> list[Units]:
        torch._dynamo.reset()
        torch.manual_seed(1)
        net = Bounded()

        def kill(step: int) -> None:
            with torch.no_grad():
                net.first.bias[:3] = -100.0
                net.first.bias[3:5] = 100.0

        return train(net, 6, 4, kill, compile_)

    expected = find(lambda net: net)
    found = find(compile_)
    torch._dynamo.reset()
    assert {each.name for each in expected if each.zero or each.saturated} == {"relu:output", "tanh:output"}
    assert found == expected
