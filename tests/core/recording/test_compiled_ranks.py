"""Compiled blocks inside of what spreads a model over processes are recorded as eager ones are."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import retrograd as rg
from tests.processes import run_in_two

pytestmark = pytest.mark.slow

BLOCKS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 12)
        self.narrow = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.wide(x).tanh())


def train(rank: int, folder: Path, *, wrapper: str, compiled: str) -> Any:
    """What one rank records, as count, RMS and mean of each site and step."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    for block in model if compiled == "blocks" else ():
        block.compile(backend="aot_eager", fullgraph=True)
    outer: nn.Module = model
    if wrapper == "ddp":
        outer = DistributedDataParallel(model)
    else:
        for block in model:
            fully_shard(block)
        fully_shard(model)
    call = torch.compile(outer, backend="aot_eager") if compiled == "whole" else outer
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    with rg.record(model) as recording:
        for step in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            call(x).square().mean().backward()
            update.step()
            update.zero_grad()
    history = recording.history
    assert not [event for event in history.events if event.kind == "fault"]
    statistics = ("count", "rms", "mean")
    return {
        name: [history[name].steps.tolist(), *(getattr(history[name], each).tolist() for each in statistics)]
        for name in history.sites
    }


WAYS = [("ddp", "blocks"), ("ddp", "whole"), ("fsdp2", "blocks"), ("fsdp2", "whole")]


def test_compiled_blocks_are_recorded_as_eager_ones_are(tmp_path: Path) -> None:
    ways = [*WAYS, ("ddp", "nothing"), ("fsdp2", "nothing")]
    works = {f"{wrapper} {part}": partial(train, wrapper=wrapper, compiled=part) for wrapper, part in ways}
    seen = run_in_two(works, tmp_path)
    for wrapper, part in WAYS:
        for found, eager in zip(seen[f"{wrapper} {part}"], seen[f"{wrapper} nothing"], strict=True):
            assert f"{BLOCKS - 1}.wide:output.grad" in eager
            assert found == eager, (wrapper, part)
