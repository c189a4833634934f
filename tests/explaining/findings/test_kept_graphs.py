"""Parts of graphs that a program keeps step after step, and what keeps a few of them, or none, for good reason."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograd.core.recording.record import record
from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.explain import explain

STEPS = 70
Step = Callable[[], Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.body(x)))
        return found


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.y = x.exp()
        return ctx.y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.y  # type: ignore[no-any-return]


class SavedExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        ctx.scale = torch.ones(())
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y


def collected_by_a_hook(net: Net) -> Step:
    features: list[Tensor] = []
    net.body.register_forward_hook(lambda module, args, output: features.append(output))
    return lambda: net(torch.randn(4, 8)).square().mean()


def a_part_of_the_loss(net: Net) -> Step:
    history: list[Tensor] = []

    def step() -> Tensor:
        fit = net(torch.randn(4, 8)).square().mean()
        penalty = net.body.weight.abs().sum() * 1e-3  # here
        history.append(penalty)
        return fit + penalty

    return step


def a_part_that_is_made_before_the_forward(net: Net) -> Step:
    history: list[Tensor] = []

    def step() -> Tensor:
        history.append(net.body.weight.abs().sum() * 1e-3)
        return net(torch.randn(4, 8)).square().mean() + history[-1]

    return step


def detached(net: Net) -> Step:
    features: list[Tensor] = []
    net.body.register_forward_hook(lambda module, args, output: features.append(output.detach()))
    return lambda: net(torch.randn(4, 8)).square().mean()


def the_last_five(net: Net) -> Step:
    features: deque[Tensor] = deque(maxlen=5)
    net.body.register_forward_hook(lambda module, args, output: features.append(output))
    return lambda: net(torch.randn(4, 8)).square().mean()


def truncated(net: Net) -> Step:
    state = torch.zeros(4, 1)

    def step() -> Tensor:
        nonlocal state
        state = 0.5 * state.detach() + net(torch.randn(4, 8))
        return state.square().mean()

    return step


def averaged(net: Net) -> Step:
    target = copy.deepcopy(net).requires_grad_(False)
    buffer: list[Tensor] = []

    def step() -> Tensor:
        x = torch.randn(4, 8)
        buffer.append(net(x).detach())
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return (net(x) - target(x)).square().mean()

    return step


def made_once(net: Net) -> Step:
    scale = nn.Parameter(torch.ones(()))
    shared = [scale.exp()]
    return lambda: (net(torch.randn(4, 8)) * shared[0]).square().mean()


def a_function_that_saves(net: Net) -> Step:
    return lambda: SavedExp.apply(net(torch.randn(4, 8))).square().mean()  # type: ignore[no-any-return]


def train(make: Callable[[Net], Step]) -> list[Finding]:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    step = make(net)
    with record(net) as recording:
        for _ in range(STEPS):
            loss = step()
            optimizer.zero_grad()
            loss.backward(retain_graph=make is made_once)
            optimizer.step()
    return list(explain(recording.history).of("graph-leaks"))


@pytest.mark.parametrize(
    ("make", "held"),
    [
        (collected_by_a_hook, "`linear` made in body"),
        (a_part_of_the_loss, "`mul`"),
        (a_part_that_is_made_before_the_forward, "`MulBackward0`"),
    ],
)
def test_what_is_kept_step_after_step_is_named(make: Callable[[Net], Step], held: str) -> None:
    (found,) = train(make)
    assert found.severity == "warning"
    assert held in found.message
    assert "still held at step 64" in found.message
    assert make is not a_part_of_the_loss or found.line == f"{__file__}:{line_here(make)}"


@pytest.mark.parametrize("make", [detached, the_last_five, truncated, averaged, made_once, a_function_that_saves])
def test_what_is_let_go_or_kept_for_a_while_is_none(make: Callable[[Net], Step]) -> None:
    assert train(make) == []


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(("function", "is_held"), [(Exp, True), (SavedExp, False)])
def test_a_function_that_keeps_its_own_output(function: type[torch.autograd.Function], is_held: bool) -> None:
    outputs: list[weakref.ref[Tensor]] = []

    def make(net: Net) -> Step:
        def step() -> Tensor:
            output: Tensor = function.apply(net(torch.randn(4, 8)))  # here
            outputs.append(weakref.ref(output))
            return output.square().mean()

        return step

    found = train(make)
    assert (sum(each() is not None for each in outputs) > STEPS / 2) == is_held  # what Python itself says
    assert [each.message.partition(",")[0] for each in found] == (
        [f"Exp ({__file__.rpartition('/')[2]}:{line_here(make)}) keeps its output as ctx.y"] if is_held else []
    )


def line_here(case: Callable[..., object]) -> int:
    lines, first = inspect.getsourcelines(case)
    return first + next(number for number, text in enumerate(lines) if "# here" in text)
