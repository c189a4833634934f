"""Models that are trained by several threads at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.rewriting.rewriting import rewrite
from retrograd.rewriting.rules.rule import Rule, SiteState
from tests.rewriting.models import add_one, assert_same, gradients, halve, make_net, weights


def in_threads(*functions: Callable[[], Any]) -> None:
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(functions))

    def run(function: Callable[[], Any]) -> None:
        try:
            barrier.wait()
            function()
        except BaseException as error:  # shown by whoever waits
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Counting(Rule):
    """A memory that loses numbers where two threads are in it at once."""

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        count = state.get("count", 0)
        total = value.detach().abs().sum() * 0  # lets other threads in
        state.put("count", count + 1)
        return value + total


def train(net: nn.Module, seed: int, steps: int = 20, scaled: bool = False) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (seed % 8 + 2), enabled=scaled)
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(net(torch.randn(5, 3, generator=random)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


def test_each_its_own_model_and_rules() -> None:
    nets, plain = [make_net(seed) for seed in range(3)], [make_net(seed) for seed in range(3)]
    rules = {"1:output": Counting(), "1:output.grad": halve, "2:weight.grad": halve}
    handles = [rewrite(net, {**rules, "1:output": Counting()}) for net in nets]
    in_threads(*(lambda net=net, seed=seed: train(net, seed, scaled=True) for seed, net in enumerate(nets)))
    for handle in handles:
        handle.remove()
    for seed, net in enumerate(plain):
        with rewrite(net, {**rules, "1:output": Counting()}):
            train(net, seed)
        assert_same(weights(nets[seed]), weights(net))


def test_models_of_one_rewriting() -> None:
    """Steps, calls and scales of the threads do not mix."""
    nets = {f"n{seed}": make_net(seed) for seed in range(3)}
    seen: dict[str, list[int]] = {name: [] for name in nets}

    def note(value: Tensor, state: SiteState) -> Tensor:
        seen[state.site.split(".")[0]].append(state.call)
        return value.clamp(-0.01, 0.01)

    with rewrite(nets, {"*.1:output.grad": note, "*.0:output": note}):
        in_threads(
            *(lambda net=net, seed=seed: train(net, seed, scaled=True) for seed, net in enumerate(nets.values()))
        )
    assert {name: set(calls) for name, calls in seen.items()} == {name: {1} for name in nets}
    for seed in range(3):
        plain = make_net(seed)
        with rewrite(
            plain, {"1:output.grad": lambda v, s: v.clamp(-0.01, 0.01), "0:output": lambda v, s: v.clamp(-0.01, 0.01)}
        ):
            train(plain, seed)
        assert_same(weights(nets[f"n{seed}"]), weights(plain))


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.cell(x))
        return x


def test_one_model_for_all() -> None:
    """Each site has one memory, and each thread counts calls by itself."""
    net, rule, steps = Loop(), Counting(), 30
    calls: list[int] = []

    def note(value: Tensor, state: SiteState) -> None:
        calls.append(state.call)

    def run() -> None:
        for _ in range(steps):
            net(torch.ones(2, 3)).sum().backward()

    with rewrite(net, {"cell:output": [rule, note], "cell:output.grad": [rule, note]}):
        in_threads(run, run, run)
    assert rule.state_at("cell:output").get("count") == 3 * 3 * steps
    assert rule.state_at("cell:output.grad").get("count") == 3 * 3 * steps
    assert sorted(set(calls)) == [1, 2, 3]
    assert [calls.count(call) for call in (1, 2, 3)] == [2 * 3 * steps] * 3


def test_forwards_here_and_backward_there() -> None:
    net, x = make_net(), torch.randn(5, 3)
    outs: list[Tensor] = []
    with rewrite(net, {"1:output.grad": halve, "0:weight.grad": halve}):
        for _ in range(2):
            in_threads(lambda: outs.append(net(x)))
            outs.pop().square().sum().backward()
    found = gradients(net)
    net.zero_grad()
    for _ in range(2):
        h = net[1](net[0](x))
        h.register_hook(lambda gradient: gradient * 0.5)
        net[2:](h).square().sum().backward()
    expected = gradients(net)
    expected["0.weight"] *= 0.5
    assert_same(found, expected)


def test_values_of_parameters_in_threads() -> None:
    """What stands for a parameter is seen by all threads, so they call the module one after the other."""
    net, steps = Loop(), 40
    inputs = [torch.full((2, 3), float(index)) for index in range(3)]

    def by_call(value: Tensor, state: SiteState) -> Tensor:
        return value * state.call

    def expect(x: Tensor) -> Tensor:
        for call in (1, 2, 3):
            x = torch.tanh(nn.functional.linear(x, net.cell.weight * call + 1, net.cell.bias))
        return x.detach()

    found: list[list[Tensor]] = [[] for _ in inputs]

    def run(index: int) -> None:
        for _ in range(steps):
            out = net(inputs[index])
            out.sum().backward()
            found[index].append(out.detach())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with rewrite(net, {"cell:weight": by_call}), rewrite(net, {"cell:weight": add_one}):
            in_threads(*(lambda index=index: run(index) for index in range(len(inputs))))
    finally:
        sys.setswitchinterval(interval)
    for x, outs in zip(inputs, found, strict=True):
        expected = expect(x)
        assert all(torch.equal(out, expected) for out in outs)
    assert "weight" not in vars(net.cell)
