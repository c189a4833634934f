from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.findings.record import CannotTell, Record
from retrograd.history.facts import Input, Operations, Parameter
from retrograd.history.sink import Moment
from tests.findings.by_hand import Elements, ask, check, make_record, spread

FLAT = [0.7] * 20


def make_net(
    sizes: dict[str, float],
    modules: dict[str, str],
    loss: float = 0.7,
    *,
    first: int = 0,
    classes: int = 2,
    also: Sequence[Parameter] = (),
) -> Record:
    """Layers whose outputs have these root mean squares."""
    sites: dict[str, np.ndarray] = {f"{path}:output": spread(4 * size) for path, size in sizes.items()}
    sites |= {f"{path}:weight.grad": spread(1.0) for path in sizes if modules[path] == "Linear"}
    listed = (("cross_entropy", "train.py:9", "", "NllLossBackward0", (), (f"float32[8, {classes}]", "int64[8]")),)
    facts = [
        Operations(name="self", listed=tuple((*each, ("float32[]",), "", False) for each in listed)),
        Input(name="self:input.x", value=0.0, std=1.0, dtype="float32", moment=Moment(0)),
        *also,
    ]
    return make_record(range(first, first + 20), lambda step: sites, [loss] * 20, modules=modules, facts=facts)


DEEP = {"self": "Sequential", "0": "Linear", "1": "ReLU", "2": "Linear", "3": "ReLU", "4": "Linear"}


def test_outputs_that_grow_from_layer_to_layer() -> None:
    [found] = ask("bad-init", make_net({"0": 10.0, "1": 7.0, "2": 70.0, "3": 50.0, "4": 500.0}, DEEP))
    assert (found.severity, found.site, found.step, found.line) == ("critical", "0", 0, "train.py:1")
    assert "3 layers" in found.message


def test_a_head_that_loses_much() -> None:
    sizes = {"0": 0.6, "1": 0.4, "2": 0.5, "3": 0.3, "4": 60.0}
    [found] = ask("bad-init", make_net(sizes, DEEP, loss=50.0, classes=10))
    assert found.site == "4"
    assert not ask("bad-init", make_net(sizes, DEEP, loss=2.4, classes=10))


@pytest.mark.parametrize(("bias", "is_found"), [(0.0, True), (29.0, True), (60.0, False)])
def test_a_large_bias_is_no_large_weight(bias: float, *, is_found: bool) -> None:
    """Of an output of 60 the weights make 31 at least where the bias is 29; nothing need be theirs where it is 60."""
    look = Parameter(name="4:bias", value=bias, shape=(10,), dtype="float32", moment=Moment(0))
    sizes = {"0": 0.6, "1": 0.4, "2": 0.5, "3": 0.3, "4": 60.0}
    assert bool(ask("bad-init", make_net(sizes, DEEP, loss=50.0, classes=10, also=[look]))) == is_found


def test_a_tanh_behind_large_weights() -> None:
    tanh = DEEP | {"3": "Tanh"}
    [found] = ask("bad-init", make_net({"0": 0.6, "1": 0.4, "2": 30.0, "3": 1.0, "4": 0.5}, tanh))
    assert found.site == "2"
    assert not ask("bad-init", make_net({"0": 0.6, "1": 0.4, "2": 3.0, "3": 1.0, "4": 0.5}, tanh))


def test_usual_weights_at_the_start() -> None:
    assert not ask("bad-init", make_net({"0": 0.6, "1": 0.4, "2": 0.3, "3": 0.2, "4": 0.1}, DEEP))
    assert not ask("bad-init", make_net({"0": 1.4, "1": 1.0, "2": 1.4, "3": 1.0, "4": 1.4}, DEEP))  # He's


def test_a_norm_that_makes_large_is_none() -> None:
    normed = {"self": "Sequential", "0": "Linear", "1": "LayerNorm", "2": "Linear"}
    assert not ask("bad-init", make_net({"0": 0.01, "1": 20.0, "2": 12.0}, normed))


def test_a_run_that_was_resumed_has_no_first_step() -> None:
    with pytest.raises(CannotTell, match="first step"):
        check("bad-init", make_net({"0": 10.0, "1": 7.0, "2": 70.0, "3": 50.0, "4": 500.0}, DEEP, first=7))


def make_weights(norms: dict[str, float], facts: list[Parameter] | None = None, reached: float = 1.0) -> Record:
    """Linear layers with these norms of their weights, and a gradient of this size at their outputs."""
    paths = list(norms)

    def sites(step: int) -> Elements:
        outputs = {f"{path}:output": spread(1.0) for path in paths}
        outputs |= {f"{path}:output.grad": spread(reached) for path in paths}
        gradients = {f"{path}:weight.grad": spread(reached if norms[path] else 0.0) for path in paths}
        return outputs | gradients | {f"{path}:weight.update": spread(0.1 * norms[path]) for path in paths}

    modules = {"self": "Sequential"} | dict.fromkeys(paths, "Linear")
    weights = {f"{path}:weight": norm for path, norm in norms.items()}
    return make_record(range(20), sites, FLAT, weights=lambda step: weights, modules=modules, facts=facts or [])


def test_layers_of_zeros_one_behind_the_other() -> None:
    [found] = ask("symmetric-init", make_weights({"0": 1.0, "2": 0.0, "4": 0.0}))
    assert (found.site, found.line) == ("2:weight", "train.py:2")
    assert "are zero, and stay so" in found.message


def test_a_single_layer_of_zeros_is_meant() -> None:
    assert not ask("symmetric-init", make_weights({"0": 1.0, "2": 1.0, "4": 0.0}))
    assert not ask("symmetric-init", make_weights({"a": 0.0, "mid": 1.0, "b": 0.0}))


def look(step: int, same: int) -> Parameter:
    return Parameter(name="2:weight", value=1.0, shape=(16, 16), same_rows=same, moment=Moment(step))


def test_rows_that_stay_the_same() -> None:
    net = {"0": 1.0, "2": 1.0}
    [found] = ask("symmetric-init", make_weights(net, [look(0, 16), look(1, 16), look(8, 16)]))
    assert (found.site, found.severity) == ("2:weight", "critical")
    assert "All 16 rows" in found.message
    assert "at step 8" in found.message
    assert not ask("symmetric-init", make_weights(net, [look(0, 16), look(1, 0), look(8, 0)]))  # a head of zeros
    assert not ask("symmetric-init", make_weights(net, [look(0, 2), look(1, 2), look(8, 2)]))  # padding rows


def test_rows_that_get_no_gradient_do_not_learn_as_one() -> None:
    looks = [look(0, 16), look(1, 16), look(8, 16)]
    assert not ask("symmetric-init", make_weights({"0": 1.0, "2": 1.0}, looks, reached=0.0))
    assert not ask("symmetric-init", make_weights({"0": 1.0, "2": 0.0, "4": 0.0}, reached=0.0))


class Gated(nn.Module):
    """A second branch that a mask switches off, or that has two rows of zeros behind it, or none."""

    def __init__(self, gate: float) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 1)
        self.affine = nn.Parameter(torch.tensor([1.0, 0.5, 1.0, 0.0]).repeat(3, 1))
        self.gate = gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = torch.sin(self.affine[:, 0] * x[:, :1] + self.affine[:, 1]) * self.affine[:, 2] + self.affine[:, 3]
        return torch.tanh(self.a(x)).sum(1) + self.gate * branch.sum(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("gate", [0.0, 1.0])
def test_a_branch_that_is_switched_off_gets_no_gradient_and_one_that_is_on_learns_as_one(gate: float) -> None:
    """The oracle is what the rows are after training, and whether they have moved."""
    torch.manual_seed(0)
    net = Gated(gate)
    start = net.affine.detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with rg.record(net) as recording:
        for _ in range(10):
            optimizer.zero_grad()
            net(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
    assert bool((net.affine == net.affine[0]).all())
    assert torch.equal(net.affine, start) == (gate == 0)
    found = rg.explain(recording)
    assert bool(found.of("symmetric-init")) == (gate == 1)
    assert bool(found.of("missing-gradient")) == (gate == 0)


@pytest.mark.parametrize(("rate", "is_found"), [(0.0, False), (0.01, True)])
def test_rows_that_no_update_has_changed_do_not_learn_as_one(rate: float, *, is_found: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    nn.init.constant_(net[2].weight, 0.1)
    nn.init.constant_(net[2].bias, 0.0)
    nn.init.constant_(net[4].weight, 0.1)
    groups = [{"params": net[2].parameters(), "lr": rate}, {"params": net[0].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    with rg.record(net) as recording:
        for _ in range(10):
            optimizer.zero_grad()
            net(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
    assert bool((net[2].weight == net[2].weight[0]).all())
    assert torch.equal(net[2].weight, torch.full((8, 8), 0.1)) == (rate == 0)
    assert bool(rg.explain(recording).of("symmetric-init")) == is_found
