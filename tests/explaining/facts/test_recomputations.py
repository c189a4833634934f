"""Checkpoints that compute other values in backward than in forward: held against gradients without the checkpoint."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from retrograd.core.history.saved_facts import Recomputed
from tests.explaining.facts.looking import facts_while, line_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.calls = 0
        self.cache: Tensor | None = None
        self.register_buffer("shift", torch.zeros(8))


class Counting(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.fc(x) * (1.0 if self.calls % 2 else 3.0)  # here
        return self.out(h.tanh())  # type: ignore[no-any-return]


class Writing(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc(x) + self.shift)
        with torch.no_grad():
            self.shift += 0.5  # here
        return self.out(h)  # type: ignore[no-any-return]


class Branching(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x).tanh()
        self.calls += 1
        if self.calls % 2:
            h = h * 2.0  # here
        return self.out(h.tanh())  # type: ignore[no-any-return]


class Drawing(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x) * torch.tensor([random.random() for _ in range(8)])  # here
        return self.out(h.tanh())  # type: ignore[no-any-return]


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.dropout(self.fc(x), 0.5)  # here
        return self.out(h.tanh())  # type: ignore[no-any-return]


class Caching(Block):
    """Fills a cache the first time, and keeps a mean that reaches no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.arange(8.0).cos()
        h = self.fc(x) * self.cache
        self.shift = self.shift * 0.9 + 0.1 * h.detach().mean(0)
        return self.out(h.tanh())  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, block: Block, **options: Any) -> None:
        super().__init__()
        self.block, self.options = block, options

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, **self.options)  # type: ignore[no-any-return]


def train(net: Net, fractions: list[float]) -> Callable[[], None]:
    block = net.block

    def run() -> None:
        x = torch.randn(16, 8, requires_grad=True)
        optimizer = torch.optim.SGD(block.parameters(), lr=0.0)
        for _ in range(3):
            state = torch.get_rng_state()
            calls, shift = block.calls, block.shift.clone()
            net(x).square().sum().backward()
            after = torch.get_rng_state(), block.calls, block.shift
            got = [each.grad.clone() for each in block.parameters() if each.grad is not None]
            optimizer.zero_grad()
            torch.set_rng_state(state)
            block.calls, block.shift = calls, shift
            want = torch.autograd.grad(nn.Module.__call__(block, x).square().sum(), list(block.parameters()))
            fractions.append(float(max((a - b).norm() / b.norm() for a, b in zip(got, want, strict=True))))
            torch.set_rng_state(after[0])
            block.calls, block.shift = after[1:]
            optimizer.step()

    return run


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", [Counting, Writing, Branching, Drawing, Dropping])
def test_the_first_operation_that_differs(kind: type[Block], use_reentrant: bool) -> None:
    torch.manual_seed(0)
    random.seed(0)
    options = {"preserve_rng_state": False} if kind is Dropping else {}
    net, fractions = Net(kind(), use_reentrant=use_reentrant, **options), list[float]()
    found = facts_while(train(net, fractions), net, Recomputed)
    assert fractions[0] > 0.01  # the gradients are wrong
    assert found
    assert found[0].step == 0
    line = found[0].written_line or found[0].again_line or found[0].line
    assert line == line_of("# here", kind.forward)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", [Dropping, Caching])
def test_what_is_computed_alike_is_no_fact(kind: type[Block], use_reentrant: bool) -> None:
    torch.manual_seed(0)
    net, fractions = Net(kind(), use_reentrant=use_reentrant), list[float]()
    found = facts_while(train(net, fractions), net, Recomputed)
    assert max(fractions) < 1e-5  # the gradients are right
    assert not found


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_torchs_own_checkpoint_is_back_and_gradients_were_the_same(use_reentrant: bool) -> None:
    apply, generate = torch.utils.checkpoint.CheckpointFunction.apply, "_checkpoint_without_reentrant_generator"
    before = getattr(torch.utils.checkpoint, generate)

    def gradients(is_recorded: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net, x = Net(Dropping(), use_reentrant=use_reentrant), torch.randn(16, 8, requires_grad=True)

        def run() -> None:
            net(x).square().sum().backward()

        if is_recorded:
            facts_while(run, net, Recomputed)
        else:
            run()
        return [each.grad for each in net.parameters() if each.grad is not None]

    assert all(map(torch.equal, gradients(is_recorded=True), gradients(is_recorded=False)))
    assert getattr(torch.utils.checkpoint, generate) is before
    assert torch.utils.checkpoint.CheckpointFunction.apply == apply
