"""Norms and update ratios of two processes are those of one that has the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import retrograd as rg
from tests.processes import Work, run_in_two

pytestmark = pytest.mark.slow

NAMES = ("grad_norm", "grad_norm_clipped", "update_ratio")


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


def replicate(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net)


def shard(net: nn.Module) -> nn.Module:
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    return net


def train(net: nn.Module, model: nn.Module, samples: slice) -> None:
    """Two steps as they are, two with clipping."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batches = torch.randn(4, 16, 6, generator=torch.Generator().manual_seed(1))
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        model(batch[samples]).square().mean().backward()
        if step > 1:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()


def record_rank(wrap: Callable[[nn.Module], nn.Module], rank: int, folder: Path) -> None:
    net = make()
    model = wrap(net)
    with rg.record(net, folder / wrap.__name__):
        train(net, model, slice(8 * rank, 8 * rank + 8))


WORKS: dict[str, Work] = {wrap.__name__: partial(record_rank, wrap) for wrap in (replicate, shard)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ranks")
    run_in_two(WORKS, place)
    return place


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", list(WORKS))
def test_they_are_those_of_one_process(folder: Path, kind: str, name: str) -> None:
    net = make()
    with rg.record(net) as recording:
        train(net, net, slice(None))
    expected: Any = recording.history.scalars[name]
    found = rg.open_run(folder / kind).history.scalars[name]
    assert found.steps.tolist() == expected.steps.tolist()
    assert found.values.tolist() == pytest.approx(expected.values.tolist(), rel=1e-4)
