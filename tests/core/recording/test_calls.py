"""Modules that are called several times in one micro-batch: shared, recurrent, in place."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.core.recording.collector import collect
from tests.core.recording.oracle import assert_row, listen


class Recurrent(nn.Module):
    """A cell that is called once a time step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        h = x
        for _ in range(steps):
            h = self.cell(h).tanh()
        return h


def test_every_call_has_its_own_record_and_its_own_gradient() -> None:
    torch.manual_seed(0)
    net = Recurrent()
    with listen(net) as oracle, collect(net) as seen:
        net(torch.randn(3, 4), 7).square().sum().backward()
    assert len(oracle.values["cell"]) == 7
    for call, (value, [gradient]) in enumerate(zip(oracle.values["cell"], oracle.gradients["cell"], strict=True), 1):
        name = "cell" if call == 1 else f"cell#{call}"
        assert_row(seen.one(f"{name}:output"), value)
        assert_row(seen.one(f"{name}:output.grad"), gradient)
    assert_row(seen.one("cell:weight.grad"), net.cell.weight.grad)  # type: ignore[arg-type]


def test_a_different_number_of_calls_each_step_is_counted_anew() -> None:
    net = Recurrent()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with collect(net, sites="cell:output*") as seen:
        for steps in (3, 1, 2):
            net(torch.randn(3, 4), steps).sum().backward()
            optimizer.step()
    calls = {step: [row.site for row in seen.rows if row.step == step and row.backward == -1] for step in range(3)}
    assert calls == {
        0: ["cell:output", "cell#2:output", "cell#3:output"],
        1: ["cell:output"],
        2: ["cell:output", "cell#2:output"],
    }
    assert len([row for row in seen.rows if row.backward == 0]) == 6


def test_calls_beyond_the_hundredth_merge_and_that_is_said_once() -> None:
    net = Recurrent()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with listen(net) as oracle, collect(net, sites="cell:output*") as seen:
        for _ in range(2):
            net(torch.randn(2, 4), 103).sum().backward()
            optimizer.step()
    assert_row(seen.one("cell#99:output", step=0), oracle.values["cell"][98])
    assert_row(seen.one("cell#100:output", step=0), *oracle.values["cell"][99:103])
    assert_row(seen.one("cell#100:output.grad", step=1), *(grads[0] for grads in oracle.gradients["cell"][103 + 99 :]))
    assert "cell#101:output" not in seen.names
    assert [(event.name, event.moment.step) for event in seen.events_of("note")] == [("cell#100:output", 0)]


def test_a_module_shared_by_two_paths_is_recorded_under_the_first() -> None:
    shared = nn.Linear(3, 3)
    net = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared, nn.Tanh())})

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts["a"](x) + self.parts["b"](x * 2)

    model = Both()
    with listen(model) as oracle, collect(model) as seen:
        model(torch.randn(2, 3)).sum().backward()
    for call, name in enumerate(("parts.a.0", "parts.a.0#2")):
        assert_row(seen.one(f"{name}:output"), oracle.values["parts.a.0"][call])
        assert_row(seen.one(f"{name}:output.grad"), oracle.gradients["parts.a.0"][call][0])


def test_siamese_forwards_before_one_backward_are_two_calls() -> None:
    net = nn.Linear(3, 2)
    with listen(net) as oracle, collect(net) as seen:
        (net(torch.randn(4, 3)) - net(torch.randn(4, 3))).square().sum().backward()
    for call, name in enumerate(("self", "self#2")):
        assert_row(seen.one(f"{name}:output"), oracle.values["self"][call])
        assert_row(seen.one(f"{name}:output.grad"), oracle.gradients["self"][call][0])


def in_place_and_not(net: nn.Module) -> nn.Module:
    """A twin whose activations are not in place."""
    twin = copy.deepcopy(net)
    for module in twin.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
    return twin


@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU, nn.ELU, nn.Hardtanh, nn.LeakyReLU, nn.Dropout])
def test_in_place_modules_are_as_their_twins_out_of_place(activation: type[nn.Module]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), activation(inplace=True), nn.Linear(5, 5), activation(inplace=True))
    twin = in_place_and_not(net)
    x = torch.randn(4, 3)
    torch.manual_seed(1)
    with listen(twin) as oracle:
        twin(x).square().sum().backward()
    torch.manual_seed(1)
    with collect(net) as seen:
        net(x).square().sum().backward()
    for path in ("0", "1", "2", "3"):
        assert_row(seen.one(f"{path}:output"), oracle.values[path][0])
        assert_row(seen.one(f"{path}:output.grad"), oracle.gradients[path][0][0])


def test_residual_blocks_with_in_place_additions() -> None:
    class Block(nn.Module):
        def __init__(self, *, inplace: bool) -> None:
            super().__init__()
            self.inplace = inplace
            self.fc = nn.Linear(4, 4)
            self.relu = nn.ReLU(inplace)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.fc(x)
            out = out.add_(x) if self.inplace else out + x
            return self.relu(out)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), Block(inplace=True), Block(inplace=True))
    twin = in_place_and_not(net)
    x = torch.randn(5, 3)
    with listen(twin) as oracle:
        twin(x).square().sum().backward()
    with collect(net) as seen:
        net(x).square().sum().backward()
    for path in ("0", "1", "1.fc", "1.relu", "2", "2.fc", "2.relu"):
        assert_row(seen.one(f"{path}:output"), oracle.values[path][0])
        assert_row(seen.one(f"{path}:output.grad"), oracle.gradients[path][0][0])


def test_outputs_that_are_views_of_one_tensor() -> None:
    class Split(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (*x.chunk(2, dim=1), x.T, x[0])

    net = nn.Sequential(nn.Linear(3, 4), Split())
    with collect(net) as seen:
        left, right, transposed, first = net(torch.randn(5, 3))
        for tensor in (left, right, transposed, first):
            tensor.retain_grad()
        (left * 2 + right * 3).sum().add(transposed.exp().sum()).add(first.sin().sum()).backward()
    for key, tensor in enumerate((left, right, transposed, first)):
        assert_row(seen.one(f"1:output.{key}"), tensor)
        assert tensor.grad is not None
        assert_row(seen.one(f"1:output.{key}.grad"), tensor.grad)


def test_a_view_that_is_written_to_later_keeps_what_it_was() -> None:
    class Half(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :2]

    net = nn.Sequential(nn.Linear(3, 4), Half())
    x = torch.randn(5, 3)
    with collect(net) as seen:
        out = net(x)
        value = out.detach().clone()
        out.mul_(3)  # renews the history of the view and of its base
        out.sum().backward()
    assert_row(seen.one("1:output"), value)
    assert_row(seen.one("0:output.grad"), torch.tensor([3.0, 3.0, 0.0, 0.0]).expand(5, 4))
    reasons = {item["site"]: item["reason"] for item in seen.facts["not_recorded"]}
    assert "no gradient came" in reasons["1:output.grad"]  # no node of the graph has it any more
