"""Hooks of the program's for saved tensors that give back other data: held against gradients without hooks."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import retrograd as rg

Hooks = Callable[[], AbstractContextManager[Any]]

OTHER = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def keep(x: torch.Tensor) -> torch.Tensor:
    return x


def double(x: torch.Tensor) -> torch.Tensor:
    return x.data.mul_(2)


def shift_a_little(x: torch.Tensor) -> torch.Tensor:
    return x.data.mul_(1.01)


def take_other(x: torch.Tensor) -> torch.Tensor:
    return OTHER if x.shape == OTHER.shape else x


def round_to(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    return x.to(kind)


class Copies:
    """Hooks as objects, in a context of their own."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


class Offload(saved_tensors_hooks):
    def __init__(self) -> None:
        super().__init__(Copies(), lambda held: held)


WRONG: dict[str, Hooks] = {
    "written in unpack": lambda: saved_tensors_hooks(keep, double),
    "written a little": lambda: saved_tensors_hooks(keep, shift_a_little),
    "written in pack": lambda: saved_tensors_hooks(double, keep),
    "another tensor": lambda: saved_tensors_hooks(take_other, keep),
}
RIGHT: dict[str, Hooks] = {
    "none": nullcontext,
    "the same": lambda: saved_tensors_hooks(keep, keep),
    "copies": Offload,
    "of torch": save_on_cpu,
    "as doubles": lambda: saved_tensors_hooks(functools.partial(round_to, kind=torch.float64), lambda x: x.float()),
}


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def train(hooks: Hooks, net: nn.Module | None = None) -> list[torch.Tensor]:
    """The weights, after three steps."""
    net = net or make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(3):
        x = torch.randn(8, 16)
        with hooks():
            loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [each.detach().clone() for each in net.parameters()]


def explain(hooks: Hooks) -> tuple[rg.Findings, list[torch.Tensor]]:
    net = make_net()
    with rg.record(net) as recording:
        weights = train(hooks, net)
    assert not [event for event in recording.history.events if event.kind == "fault"]
    return rg.explain(recording).of("overwritten"), weights


@pytest.mark.parametrize("name", WRONG)
def test_hooks_that_give_other_data_are_found(name: str) -> None:
    plain, bare = train(nullcontext), train(WRONG[name])
    assert not all(map(torch.equal, plain, bare)), "the hooks change the gradients"
    found, weights = explain(WRONG[name])
    assert all(map(torch.equal, bare, weights)), "recording changes nothing"
    [first] = found
    assert (first.severity, first.step) == ("critical", 0)
    assert first.line.startswith(__file__)


@pytest.mark.parametrize("name", RIGHT)
def test_hooks_that_give_the_same_are_not_spoken_of(name: str) -> None:
    found, weights = explain(RIGHT[name])
    assert all(map(torch.equal, train(nullcontext), weights))
    assert not found


def test_hooks_that_round_are_not_spoken_of() -> None:
    half = functools.partial(round_to, kind=torch.bfloat16)

    def hooks() -> saved_tensors_hooks:
        return saved_tensors_hooks(half, lambda x: x.float())

    found, weights = explain(hooks)
    assert all(map(torch.equal, train(hooks), weights))
    assert not found


def test_what_hooks_hold_is_freed_with_the_graph_and_works_after_the_recording() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    holders: list[weakref.ref[Any]] = []

    class Holder:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x.clone()
            holders.append(weakref.ref(self))

    with rg.record(net), saved_tensors_hooks(Holder, lambda held: held.x):
        loss = net(torch.randn(2, 4)).sum()
    assert type(saved_tensors_hooks.__enter__).__name__ == "function"
    loss.backward()
    assert net[0].weight.grad is not None
    gc.disable()
    try:
        del loss
        assert holders
        assert all(each() is None for each in holders)
    finally:
        gc.enable()
