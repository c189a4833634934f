"""Rules in compiled blocks, inside of ranks, autocast, and sizes that change: the weights are those of eager code."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import retrograd as rg
from tests.processes import run_in_two

pytestmark = pytest.mark.slow


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.wide(x).tanh())


def count_up(value: Tensor, state: Any) -> Tensor:
    """What no compiler can trace: it remembers, and waits for a number."""
    count = state.get("count", 0) + 1
    state.put("count", count)
    return value * (1 + 0.1 * count) if value.norm().item() > 0 else value


RULES: dict[str, Any] = {
    "0.wide:output": count_up,
    "1.narrow:output.grad": count_up,
    "1.wide:input.input.grad": rg.rules.Scale(0.5),
    "0.narrow:weight.grad": rg.rules.Scale(3.0),
}


def build() -> nn.Sequential:
    torch._dynamo.reset()
    torch.manual_seed(3)
    return nn.Sequential(Block(), Block())


def train(model: nn.Module, call: Callable[[Tensor], Tensor], rank: int = 0, sizes: tuple[int, ...] = (4, 4, 4)) -> Any:
    """The weights after some steps under rules."""
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    with rg.rewrite(model, RULES):
        for step, size in enumerate(sizes):
            x = torch.randn(size, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            call(x).float().square().mean().backward()
            update.step()
            update.zero_grad()
    weights = (weight.full_tensor() if hasattr(weight, "full_tensor") else weight for weight in model.parameters())
    return [weight.tolist() for weight in weights]


def train_rank(rank: int, folder: Path, *, wrapper: str, compiled: str) -> Any:
    model = build()
    for block in model if compiled == "blocks" else ():
        block.compile(backend="aot_eager", fullgraph=True)
    outer: nn.Module = model
    if wrapper == "ddp":
        outer = DistributedDataParallel(model)
    elif wrapper == "split":
        rank = 0  # all have the same data
        mesh = init_device_mesh("cpu", (2,))
        plan = {"wide": ColwiseParallel(use_local_output=False), "narrow": RowwiseParallel()}
        for block in model:
            parallelize_module(block, mesh, plan)
    else:
        for block in model:
            fully_shard(block)
        fully_shard(model)
    return train(model, torch.compile(outer, backend="aot_eager") if compiled == "whole" else outer, rank)


def test_ranks(tmp_path: Path) -> None:
    ways = [(wrapper, compiled) for wrapper in ("ddp", "fsdp2") for compiled in ("nothing", "blocks", "whole")]
    works = {f"{wrapper} {part}": partial(train_rank, wrapper=wrapper, compiled=part) for wrapper, part in ways}
    seen = run_in_two(works, tmp_path)
    for wrapper, part in ways:
        for found, eager in zip(seen[f"{wrapper} {part}"], seen[f"{wrapper} nothing"], strict=True):
            assert found == eager, (wrapper, part)


@pytest.mark.thorough
def test_tensor_parallelism_does_what_one_process_does(tmp_path: Path) -> None:
    works = {part: partial(train_rank, wrapper="split", compiled=part) for part in ("nothing", "whole")}
    seen = run_in_two(works, tmp_path)
    assert seen["whole"] == seen["nothing"]
    model = build()
    for found, one in zip(seen["whole"][0], train(model, model), strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(one))


@pytest.fixture
def counted() -> Iterator[dict[str, Any]]:
    counters.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        yield counters["stats"]
    torch._dynamo.reset()
    gc.collect()  # hooks stay on modules that compiled code knows


@pytest.mark.parametrize("cast", [True, False], ids=["autocast", "sizes that change"])
def test_what_surrounds_compiled_code(counted: dict[str, Any], *, cast: bool) -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if cast else nullcontext():
            found: Tensor = model(x)
            return found

    sizes = (4, 4, 4) if cast else (4, 7, 3, 9)
    eager = build()
    expected = train(eager, partial(call, eager), sizes=sizes)
    model = build()
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True, dynamic=not cast)
    assert train(model, partial(call, model), sizes=sizes) == expected
    assert counted["unique_graphs"] == len(model)
