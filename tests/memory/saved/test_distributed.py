"""Policies for saved tensors where a model is trained by two processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from retrograd.memory.budget.planned import Planned
from retrograd.memory.policies.disk import Disk
from retrograd.memory.policies.policy import Policy
from retrograd.memory.policies.recompute import Recompute
from retrograd.memory.saved.keeping import keep_saved
from tests.processes import Work, run_in_two

pytestmark = pytest.mark.slow

POLICIES: dict[str, Callable[[Path], Policy | None]] = {
    "plain": lambda folder: None,
    "disk": lambda folder: Disk(folder, min_bytes=0),
    "recompute": lambda folder: Recompute(),
    "budget": lambda folder: Planned(0.9, folder=folder, min_bytes=0),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + output


def wrap(kind: str, model: nn.Sequential) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)
    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        if kind == "fsdp":
            fully_shard(block, mesh=mesh)
        else:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind == "fsdp":
        fully_shard(model, mesh=mesh)
    return model


def train(kind: str, policy: str, rank: int, folder: Path) -> list[Tensor]:
    """What three steps make of this process's part of the parameters."""
    torch.manual_seed(0)
    model = wrap(kind, nn.Sequential(*[Block() for _ in range(3)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0 if kind == "tensors" else rank)
    chosen = POLICIES[policy](folder)
    with ExitStack() as stack:
        handle = None if chosen is None else stack.enter_context(keep_saved(model, chosen))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(6, 16, generator=generator)).square().mean().backward()
            optimizer.step()
    if handle is not None and policy != "recompute":
        assert next(iter(handle.accounts.values())).stretches > 0
    return [p.to_local() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


class Training:
    """One of them, as something that can be sent to another process."""

    def __init__(self, kind: str, policy: str) -> None:
        self.kind, self.policy = kind, policy

    def __call__(self, rank: int, folder: Path) -> Any:
        return train(self.kind, self.policy, rank, folder)


def test_every_bit_is_the_same(tmp_path: Path) -> None:
    kinds = ("ddp", "fsdp", "tensors")
    works: dict[str, Work] = {f"{kind}-{policy}": Training(kind, policy) for kind in kinds for policy in POLICIES}
    found = run_in_two(works, tmp_path)
    for kind in kinds:
        for policy in POLICIES:
            for parts, expected in zip(found[f"{kind}-{policy}"], found[f"{kind}-plain"], strict=True):
                assert len(parts) == len(expected) > 0
                assert all(torch.equal(a, b) for a, b in zip(parts, expected, strict=True)), f"{kind}, {policy}"
