"""Models that are trained in two processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from retrograd.core.errors import AdjointError
from retrograd.tools.adjoint.check import check_adjoint
from tests.processes import Work, run_in_two

pytestmark = pytest.mark.slow


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 0.5


class Faulty(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Halved.apply(x)  # type: ignore[no-untyped-call]
        return out


def make_net(*, faulty: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), Faulty() if faulty else nn.Tanh(), nn.Linear(4, 2))


def check_replica(rank: int, folder: Path, faulty: bool) -> tuple[bool, list[str], list[Tensor]]:
    """One process alone checks, so nothing of it may wait for the other; then both train on."""
    model = DistributedDataParallel(make_net(faulty=faulty))
    x = torch.randn(5, 3)
    check = check_adjoint(model, x) if rank == 0 else None
    model(x).sum().backward()
    gradients = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    return bool(check), [str(row.site) for row in check.faults] if check is not None else [], gradients


def check_sharded(rank: int, folder: Path) -> str:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(AdjointError) as caught:
        check_adjoint(fully_shard(make_net(faulty=False), mesh=mesh), torch.randn(5, 3))
    return str(caught.value)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    works: dict[str, Work] = {
        "right": partial(check_replica, faulty=False),
        "faulty": partial(check_replica, faulty=True),
        "sharded": check_sharded,
    }
    return run_in_two(works, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize(("name", "right", "faults"), [("right", True, []), ("faulty", False, ["1:input.x"])])
def test_a_replicated_model(found: dict[str, list[Any]], name: str, right: bool, faults: list[str]) -> None:
    (is_right, told, gradients), (_, _, others) = found[name]
    assert (is_right, told) == (right, faults)
    assert all(torch.equal(one, other) for one, other in zip(gradients, others, strict=True))


def test_a_sharded_model_is_refused(found: dict[str, list[Any]]) -> None:
    assert "cannot be copied" in found["sharded"][0]
