from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.findings import explain
from retrograd.findings.record import CannotTell, Record
from retrograd.history.facts import Buffer, Input, Modes, OptimizerMade, Parameter
from retrograd.history.sink import Moment
from tests.findings.by_hand import Elements, ask, check, make_record, spread

FLAT = [0.7] * 20
NORMED = {"self": "Sequential", "0": "Linear", "1": "BatchNorm1d", "2": "Linear"}
LOOKS = (0, 1, 2, 4, 8, 16)


def make_norm(means: list[float], values: int = 64, evaluating: tuple[str, ...] = ()) -> Record:
    """A norm of 4 channels, with the mean of its running_mean at each look; what goes in has a mean of sin(step)."""
    looks = [
        Buffer(name="1:running_mean", value=mean, digest=str(mean), moment=Moment(step))
        for step, mean in zip(LOOKS, means, strict=True)
    ]

    def sites(step: int) -> Elements:
        into = spread(1.0, values) + np.sin(step)
        return {"0:output": into, "1:output": spread(1.0, values), "1:weight.grad": spread(1.0, 4)}

    modes = [Modes(name="self", evaluating=evaluating)]
    return make_record(range(20), sites, FLAT, modules=NORMED, facts=[*looks, *modes])


def test_statistics_that_are_never_updated() -> None:
    [found] = ask("batch-norm", make_norm([0.0] * 6))
    assert (found.site, found.line) == ("1", "train.py:2")
    assert "the same at step 0 and at step 16" in found.message


def test_statistics_of_the_last_batch() -> None:
    [found] = ask("batch-norm", make_norm([float(np.sin(step - 1)) for step in LOOKS]))
    assert "those of the last batch alone" in found.message


def test_statistics_of_a_few_values() -> None:
    [found] = ask("batch-norm", make_norm([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], values=8))
    assert "from 2 values of each channel" in found.message


def test_norms_as_they_should_be() -> None:
    assert not ask("batch-norm", make_norm([0.0, *(0.1 * float(np.sin(step)) for step in LOOKS[:-1])]))
    assert not ask("batch-norm", make_norm([0.0] * 6, evaluating=("1",)))
    assert not ask("batch-norm", make_norm([0.0] * 6, evaluating=("self",)))
    assert len(ask("batch-norm", make_norm([0.0] * 6, evaluating=("0",)))) == 1


def test_a_norm_that_evaluates_is_not_judged_by_when_it_trained_or_by_another_model() -> None:
    def make(*modes: Modes) -> Record:
        record = make_norm([0.0] * 6)
        record.facts[:] = [each for each in record.facts if not isinstance(each, Modes)] + list(modes)
        return record

    trial = Modes(name="self", training=("self",), moment=Moment(0))
    evaluates = Modes(name="self", evaluating=("self",), moment=Moment(0))
    later = Modes(name="self", evaluating=("self",), moment=Moment(5))
    assert not ask("batch-norm", make(trial, evaluates))
    assert ask("batch-norm", make(trial, later))
    assert ask("batch-norm", make(evaluates, Modes(name="self", training=("self",), moment=Moment(5))))
    assert not ask("batch-norm", make(*[Modes(name="1", evaluating=("1",)), Modes(name="head", training=("head",))]))


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


def make_ranks(first: list[str], second: list[str]) -> Record:
    facts = [
        Input(name="self:input.x", value=0.0, digest=digest, moment=Moment(step), dtype="float32")
        for step, digest in enumerate(first)
    ]
    record = make_record(range(len(first)), lambda step: {"0:output": spread(1.0)}, FLAT[: len(first)], facts=facts)
    others = [
        Input(name="self:input.x", value=0.0, digest=digest, moment=Moment(step), dtype="float32", rank=1)
        for step, digest in enumerate(second)
    ]
    record.facts.extend(others)  # of the second process
    record.manifest["processes"] = 2
    return record


def test_ranks_that_are_given_the_same() -> None:
    [found] = ask("ranks-disagree", make_ranks(["a", "b", "c"], ["a", "b", "c"]))
    assert (found.severity, found.rank) == ("warning", 1)
    assert "at all of 3 steps" in found.message


def test_ranks_that_are_given_their_own() -> None:
    assert not ask("ranks-disagree", make_ranks(["a", "b", "c"], ["d", "e", "f"]))
    assert not ask("ranks-disagree", make_ranks(["a", "b", "c"], ["a", "b", "f"]))
    assert not ask("ranks-disagree", make_ranks(["a", "a", "a"], ["a", "a", "a"]))  # no data
    with pytest.raises(CannotTell, match="a single rank"):
        check("ranks-disagree", make_ranks(["a", "b", "c"], []))


def test_ranks_that_share_a_model_share_its_batches() -> None:
    alike = make_ranks(["a", "b", "c"], ["a", "b", "c"])
    alike.manifest["split"] = {"ranks": [0, 1], "stages": {}}
    with pytest.raises(CannotTell, match="share each forward"):
        check("ranks-disagree", alike)
    alike.facts.extend([replace(each, rank=2) for each in alike.of(Input) if each.rank == 1])  # another replica
    assert [each.rank for each in ask("ranks-disagree", alike)] == [2]


def make_hooked(factor: float, noise: float = 0.0, weight: float = 1.0) -> Record:
    """A layer whose bias gets the sum of its output's gradient, and a factor."""
    random = np.random.default_rng(0)

    def sites(step: int) -> Elements:
        gradient = random.normal(size=(32, 4)) + 1
        bias = gradient.sum(axis=0) * factor * (1 + noise * random.normal())
        inputs = random.normal(size=(32, 8))
        return {
            "0:output": gradient.ravel(), "0:output.grad": gradient.ravel(), "0:bias.grad": bias,
            "0:weight.grad": weight * (gradient.T @ inputs).ravel(),
        }  # fmt: skip

    data = Input(name="self:input.x", value=0.0, std=1.0, dtype="float32")
    return make_record(range(20), sites, FLAT, facts=[data])


def test_a_gradient_that_is_multiplied() -> None:
    [found] = ask("hooks-scale", make_hooked(50.0))
    assert (found.site, found.line) == ("0:output", "train.py:1")
    assert "by 50:" in found.message
    assert "by 0:" in ask("hooks-scale", make_hooked(0.0))[0].message
    [found] = ask("hooks-scale", make_hooked(1.0, weight=1e-6))
    assert found.site == "0:weight"


def test_gradients_as_they_are() -> None:
    assert not ask("hooks-scale", make_hooked(1.0))
    assert not ask("hooks-scale", make_hooked(1.03))  # rounding of bfloat16
    assert not ask("hooks-scale", make_hooked(2.0, noise=0.3))  # accumulated, not multiplied


def test_gradients_that_ranks_average_are_not_judged() -> None:
    merged = make_hooked(0.5)
    merged.manifest["processes"] = 2  # their rows were merged while they trained, so all are rank 0's
    with pytest.raises(CannotTell):
        check("hooks-scale", merged)


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


def make_replicas(digests: dict[str, tuple[str, str]], later: dict[str, tuple[str, str]]) -> Record:
    """Parameters of 16 elements on two ranks, with their digests at step 0 and at step 8."""
    looks = [
        Parameter(name=name, value=1.0, shape=(16,), grad="some", digest=pair[rank], rank=rank, moment=Moment(step))
        for step, listed in ((0, digests), (8, later))
        for name, pair in listed.items()
        for rank in (0, 1)
    ]
    record = make_record(range(9), lambda step: {f"{name}.grad": spread(1.0) for name in digests}, FLAT[:9])
    record.facts.extend(looks)
    record.manifest["processes"] = 2
    return record


def test_ranks_that_train_models_of_their_own() -> None:
    alike, apart = {"0:weight": ("a", "a"), "0:bias": ("b", "b")}, {"0:weight": ("c", "d"), "0:bias": ("e", "f")}
    [found] = ask("ranks-disagree", make_replicas(alike, apart))
    assert (found.severity, found.step, found.site) == ("critical", 8, "0:weight")
    [found] = ask("ranks-disagree", make_replicas(apart, apart))
    assert (found.severity, found.step) == ("warning", 0)


def test_processes_that_know_nothing_of_each_other() -> None:
    apart = make_replicas({"0:weight": ("a", "b")}, {"0:weight": ("c", "d")})
    apart.manifest["processes"] = 1
    with pytest.raises(CannotTell, match="found each other"):
        check("ranks-disagree", apart)


def test_ranks_that_hold_the_same() -> None:
    alike = {"0:weight": ("a", "a"), "0:bias": ("b", "b")}
    assert not ask("ranks-disagree", make_replicas(alike, alike))
    assert not ask("ranks-disagree", make_replicas(alike, {"0:weight": ("c", "d"), "0:bias": ("b", "b")}))  # an expert


def test_an_optimizer_of_each_stage_holds_its_own_parameters() -> None:
    made = OptimizerMade(name="SGD#1", groups=({"parameters": ["0:weight"], "unknown": 0},), moment=Moment(0))
    sites = {f"{name}:weight.grad": spread(1.0) for name in "01"}
    record = make_record(range(6), lambda step: sites, FLAT[:6], facts=[made])
    assert ask("not-optimized", record)
    staged = make_record(range(6), lambda step: sites, FLAT[:6], facts=[made])
    staged.facts.append(replace(made, groups=({"parameters": ["1:weight"], "unknown": 0},), rank=1))
    assert not ask("not-optimized", staged)
    assert staged.optimizers["SGD#1"].parameters == ["0:weight", "1:weight"]
