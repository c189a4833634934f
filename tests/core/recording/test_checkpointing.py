"""Checkpointed parts are computed twice and recorded once, value and gradient of the very same call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from tests.core.recording.collector import Collector, collect
from tests.core.recording.oracle import assert_row, listen

Run = Callable[..., torch.Tensor]


def plainly(function: Run, *args: torch.Tensor) -> torch.Tensor:
    return function(*args)


def reentrantly(function: Run, *args: torch.Tensor) -> torch.Tensor:
    return checkpoint(function, *args, use_reentrant=True)


def not_reentrantly(function: Run, *args: torch.Tensor) -> torch.Tensor:
    return checkpoint(function, *args, use_reentrant=False)


def without_early_stop(function: Run, *args: torch.Tensor) -> torch.Tensor:
    return checkpoint(function, *args, use_reentrant=False, early_stop=False)


def keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op == torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def selectively(function: Run, *args: torch.Tensor) -> torch.Tensor:
    return checkpoint(
        function,
        *args,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(keep_products),
    )


WAYS = [reentrantly, not_reentrantly, without_early_stop, selectively]


class Net(nn.Module):
    """Three blocks, each in a part of its own; ``way`` says how parts are run."""

    def __init__(self, way: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.way = way
        self.stem = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3)) for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = self.way(block, h)
        return self.head(h)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_inputs_are_those_of_the_plain_net(way: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    plain, x = Net(plainly), torch.randn(5, 3, requires_grad=True)
    other = copy.deepcopy(plain)
    other.way = way
    records = []
    for net in (plain, other):
        torch.manual_seed(1)
        with collect(net, sites="*:input*") as seen:
            net(x).square().sum().backward()
        records.append(seen)
    names = {row.site for row in records[0].rows}
    assert len(names) == 2 * (3 * 4 + 3)
    for name in names:
        mine, theirs = records[1].one(name), records[0].one(name)
        assert (mine.mean, mine.rms, mine.calls) == pytest.approx((theirs.mean, theirs.rms, theirs.calls), rel=1e-5)


def whole(net: nn.Sequential, way: Run, x: torch.Tensor) -> torch.Tensor:
    return way(net, x)


def part_by_part(net: nn.Sequential, way: Run, x: torch.Tensor) -> torch.Tensor:
    for part in net:
        x = way(part, x)
    return x


def train_from_outside(call: Callable[..., torch.Tensor], way: Run, net: nn.Sequential) -> None:
    """Two steps of two micro-batches, of two forwards each."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    examples = torch.Generator().manual_seed(2)
    for _ in range(2):
        for _ in range(2):
            x, y = (torch.randn(2, 3, generator=examples).requires_grad_() for _ in range(2))
            (call(net, way, x).square() * call(net, way, y).exp()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", [whole, part_by_part])
def test_a_model_may_be_checkpointed_from_outside(call: Callable[..., torch.Tensor], way: Run) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
    other, bare = copy.deepcopy(plain), copy.deepcopy(plain)
    sites = ["*:output*", "*:input*"]  # a parameter has its gradient part by part, and so in parts
    with collect(plain, sites=sites) as expected:
        train_from_outside(call, plainly, plain)
    with collect(other, sites=sites) as seen:
        train_from_outside(call, way, other)
    train_from_outside(call, way, bare)
    for mine, theirs in zip(other.parameters(), bare.parameters(), strict=True):
        assert torch.equal(mine, theirs)

    def list_rows(collector: Collector) -> dict[Any, Any]:
        rows = sorted(collector.rows, key=lambda row: (row.step, row.micro, row.backward, row.site))
        return {
            (row.site, row.phase, row.step, row.micro, row.backward): (row.calls, row.mean, row.rms) for row in rows
        }

    mine, theirs = list_rows(seen), list_rows(expected)
    assert {row.phase for row in expected.rows} == {"train"}
    assert mine.keys() == theirs.keys()
    assert len(mine) == len(seen.rows)
    torch.testing.assert_close(list(mine.values()), list(theirs.values()), rtol=1e-5, atol=1e-6)
    assert not seen.facts["faults"]


def test_a_checkpoint_that_no_pass_can_reach_is_no_training() -> None:
    net = nn.Linear(3, 4)
    x = torch.randn(2, 3, requires_grad=True)
    with collect(net) as seen, torch.no_grad():
        reentrantly(net, x)
    assert {row.phase for row in seen.rows} == {"no_grad"}


def test_segments_of_a_sequence() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint_sequential(self.net, 3, x, use_reentrant=True)

    x = torch.randn(2, 4, requires_grad=True)
    with listen(net) as oracle:
        net(x).square().sum().backward()
    model = Model()
    with collect(model) as seen:
        model(x).square().sum().backward()
    for path in map(str, range(6)):
        assert_row(seen.one(f"net.{path}:output"), oracle.values[path][0])
        assert_row(seen.one(f"net.{path}:output.grad"), oracle.gradients[path][0][0])


def test_a_frozen_part_that_is_never_computed_again_does_not_shift_the_others() -> None:
    torch.manual_seed(0)
    block = nn.Linear(4, 4)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                teacher = self.block(x)  # never computed again
            h = checkpoint(self.block, x * 2 + teacher, use_reentrant=True)
            with torch.no_grad():
                self.block(h)
            return self.block(h)

    model = Model()
    x = torch.randn(3, 4, requires_grad=True)
    with collect(model, sites="block:output*") as seen:
        model(x).sum().backward()
    assert [row.site for row in seen.rows if row.backward == 0] == ["block#2:output.grad", "block#4:output.grad"]
    assert_row(seen.one("block#4:output.grad"), torch.ones(3, 4))
    assert_row(seen.one("block#2:output.grad"), torch.ones(3, 4) @ block.weight.detach())
