from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.history.facts import OptimizerMade
from retrograd.core.history.sink import Moment
from retrograd.explaining.findings import explain
from retrograd.explaining.findings.record import CannotTell, Record
from tests.explaining.findings.by_hand import ask, check, make_record, spread

FLAT = [0.7] * 20


def _finetune(*, trains: bool, follows: bool = False) -> Record:
    """A head that is trained on a frozen backbone with a norm, in training mode or not, which may follow the head."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).requires_grad_(False).train(trains)
    net = nn.Sequential(OrderedDict(backbone=backbone, head=nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(net.head.parameters(), lr=0.1)
    before = backbone[1].running_mean.clone()
    with rg.record(net) as recording:
        for _ in range(6):
            optimizer.zero_grad()
            net(torch.randn(16, 4) + 3).square().mean().backward()
            optimizer.step()
            if follows:
                backbone[0].weight.data.lerp_(net.head.weight.data.mean(0, keepdim=True).T.repeat(1, 4), 0.1)
    assert torch.equal(before, backbone[1].running_mean) != trains
    return explain.make_record(recording)


def test_statistics_that_move_under_frozen_weights() -> None:
    [found] = ask("batch-norm", _finetune(trains=True))
    assert found.site == "backbone.1"
    assert "move in training, though all weights of backbone are frozen" in found.message
    assert "differ" not in found.refute  # that they do is what was found
    assert not ask("batch-norm", _finetune(trains=False))
    assert not ask("batch-norm", _finetune(trains=True, follows=True))


@pytest.mark.parametrize("with_backward", [False, True])
def test_a_gradient_penalty_multiplies_nothing(with_backward: bool) -> None:
    """Its first pass leaves a gradient at the output, and none at the bias."""
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(2, 16), nn.SiLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(critic.parameters(), 1e-3)
    with rg.record(critic) as recording:
        for _ in range(12):
            x = torch.randn(16, 2, requires_grad=True)
            output = critic(x)
            optimizer.zero_grad()
            if with_backward:
                output.sum().backward(inputs=[x], retain_graph=True)
                loss = output.mean()
            else:
                (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
                loss = output.mean() + 10 * (slope.norm(2, 1) - 1).square().mean()
            loss.backward()
            optimizer.step()
    with pytest.raises(CannotTell, match="chosen inputs"):
        check("hooks-scale", explain.make_record(recording))


def test_an_optimizer_of_each_stage_holds_its_own_parameters() -> None:
    made = OptimizerMade(name="SGD", groups=({"parameters": ["0:weight"], "unknown": 0},), moment=Moment(0))
    sites = {f"{name}:weight.grad": spread(1.0) for name in "01"}
    record = make_record(range(6), lambda step: sites, FLAT[:6], facts=[made])
    assert ask("not-optimized", record)
    staged = make_record(range(6), lambda step: sites, FLAT[:6], facts=[made])
    staged.facts.append(replace(made, groups=({"parameters": ["1:weight"], "unknown": 0},), rank=1))
    assert not ask("not-optimized", staged)
    assert staged.optimizers["SGD"].parameters == ["0:weight", "1:weight"]
