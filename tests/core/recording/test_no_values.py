"""Tensors without values of their own come by: export, batches of gradients, per-sample gradients, the meta device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.func import functional_call, grad, jacrev, vmap

import retrograd as rg

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


@contextmanager
def without_a_word() -> Iterator[None]:
    """Whatever we warn of is an error, as all else is not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", rg.RetrogradWarning)
        yield


def series_of(history: rg.History) -> dict[str, list[Any]]:
    """Every number of every site, by its steps."""
    names = ("step", "micro", "backward", "count", "sum", "min", "max")
    return {str(site): [history[site].rows[name].tolist() for name in names] for site in history.sites}


def train(net: nn.Sequential, between: Callable[[nn.Sequential], Any], *, recorded: bool = True) -> tuple[Any, Any]:
    """Three steps with something between forward and update; what is recorded, and what came of it."""
    optimizer, results = torch.optim.SGD(net.parameters(), 0.1), []
    with without_a_word(), rg.record(net) if recorded else nullcontext() as recording:
        for _ in range(3):
            optimizer.zero_grad()
            net(X).square().mean().backward()
            optimizer.step()
            results.append(between(net))
    assert not recorded or not [event for event in recording.history.events if event.kind == "fault"]
    return recording, [*results, *(each.detach().clone() for each in net.parameters())]


def nothing(net: nn.Sequential) -> None:
    pass


def export(net: nn.Sequential) -> Tensor:
    return torch.export.export(net, (X,)).module()(X)


def export_part(net: nn.Sequential) -> Tensor:
    return torch.export.export(net[0], (X,)).module()(X)


def export_strictly(net: nn.Sequential) -> Tensor:
    torch._dynamo.reset()
    return torch.export.export(net, (X,), strict=True).module()(X)


@pytest.mark.parametrize("between", [export, export_part, export_strictly])
def test_an_export_is_no_forward_of_the_training(between: Callable[[nn.Sequential], Tensor]) -> None:
    """What an exported program computes is what it computes without us; of the tracing nothing is recorded."""
    recording, ours = train(make_net(), between)
    _, bare = train(make_net(), between, recorded=False)
    assert len(ours) == len(bare)
    assert all(map(torch.equal, ours, bare))
    expected, _ = train(make_net(), nothing)
    assert series_of(recording.history) == series_of(expected.history)


class Watches(nn.Module):
    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net[2](rg.watch("hidden", self.net[1](self.net[0](x))))


@pytest.mark.parametrize("order", ["sc", "lcs", "cls", "css"])
def test_a_strict_export_in_any_order(order: str) -> None:
    net = Watches(make_net())
    with without_a_word(), rg.record(net) as recording:
        for each in order:
            torch._dynamo.reset()
            if each == "c":
                net(X).sum().backward()
            else:
                program = torch.export.export(net, (X,), strict=each == "s")
                assert "retrograd" not in str(program.graph)
                assert torch.equal(program.module()(X), net(X))
    assert recording.history["net.0:output.grad"].count.sum() == 32
    assert recording.history["watch/hidden.grad"].count.sum() == 32


def per_sample(net: nn.Sequential) -> Tensor:
    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(net, parameters, (x[None],)).square().mean()

    found = vmap(grad(loss), in_dims=(None, 0))({name: each.detach() for name, each in net.named_parameters()}, X)
    return found["0.weight"]


def vectorized(net: nn.Sequential) -> Tensor:
    return jacobian(net, X, vectorize=True)


def batched(net: nn.Sequential) -> Tensor:
    directions = torch.eye(2)[:, None].expand(2, 4, 2)
    return torch.autograd.grad(net(X), net[0].weight, directions, is_grads_batched=True)[0]


def reverse(net: nn.Sequential) -> Tensor:
    return vmap(jacrev(net))(X)


@pytest.mark.parametrize("between", [per_sample, vectorized, batched, reverse])
def test_batches_of_gradients_are_nobodys_fault(between: Callable[[nn.Sequential], Tensor]) -> None:
    recording, ours = train(make_net(), between)
    _, bare = train(make_net(), between, recorded=False)
    assert all(map(torch.equal, ours, bare))
    weights = recording.history["0:weight.grad"]
    expected, _ = train(make_net(), nothing)
    assert weights.l2.tolist() == expected.history["0:weight.grad"].l2.tolist()
    assert [event.kind for event in recording.history.events].count("units") > 0


def test_a_model_on_meta_costs_the_others_nothing() -> None:
    def facts(**others: nn.Module) -> list[str]:
        student = make_net()
        nn.init.zeros_(student[0].weight)
        with without_a_word(), rg.record({"student": student, **others}) as recording:
            optimizer = torch.optim.SGD(student.parameters(), 0.1)
            for _ in range(3):
                optimizer.zero_grad()
                for other in others.values():
                    other(X.to("meta"))
                student(X).square().mean().backward()
                optimizer.step()
        history = recording.history
        assert not [event for event in history.events if event.kind == "fault"]
        return [event.text for event in history.events if event.kind == "parameter" and event.name == "student"]

    alone = facts()
    assert alone
    assert facts(teacher=make_net().to("meta")) == alone


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.cond(x.sum() > 0, lambda x: self.a(x), lambda x: self.b(x), (x,))
        return self.head(torch.cond(x.sum() > 0, lambda x: self.b(x), lambda x: self.a(x), (hidden,)))


@pytest.mark.parametrize("compiles", [False, True])
def test_gradients_in_the_branches_of_cond(compiles: bool) -> None:
    """They are those of the same net with plain branches."""
    torch._dynamo.reset()
    net = Branches()
    expected: dict[str, list[float]] = {"a": [], "b": []}
    for sign in (1, -1):
        first, last = ("a", "b") if sign > 0 else ("b", "a")
        one = getattr(net, first)(X.abs() * sign)
        other = getattr(net, last)(one)
        loss = net.head(other).sum()
        found = dict(zip((first, last), torch.autograd.grad(loss, (one, other)), strict=True))
        for name, gradient in found.items():
            expected[name].append(gradient.double().sum().item())
    run = torch.compile(net, backend="eager") if compiles else net
    with without_a_word(), rg.record(net) as recording:
        for sign in (1, -1):
            run(X.abs() * sign).sum().backward()
    for name, sums in expected.items():
        assert recording.history[f"{name}:output.grad"].rows["sum"].tolist() == pytest.approx(sums)
