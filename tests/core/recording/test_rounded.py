"""Gradients that are rounded on their way: mixed precision under FSDP2, and what hooks make of DDP's reduction.

One process does with plain tensors what the processes do: it rounds weights, shares of the rows, and gradients where
these do. Sums of two have one rounding, so that nothing depends on an order.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from retrograd.core.hooks.engine import TORCH
from retrograd.core.recording.record import record
from retrograd.core.runs.reader import open_run
from tests.core.recording.spread import (
    STEPS,
    Truth,
    assert_merged,
    data_of,
    loss_of,
    make_net,
    make_optimizer,
    slope_of,
)
from tests.processes import Work, run_in_two

pytestmark = pytest.mark.slow

SITES = ("*:output", "*:output.grad", "*:weight*", "*:bias*", "*:*.local.grad")

BRAIN, HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32

Reduced = Callable[[Tensor, Tensor], Tensor]
"""What two processes' gradients are reduced to."""


def make_thirds() -> nn.Sequential:
    """Weights that neither bfloat16 nor float16 holds."""
    net = make_net().float()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.div_(3)
    return net


def share_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    return data_of(step).float().chunk(2)[rank], slope_of(step).float().chunk(2)[rank]


# ---- in one process ----


def mean_in(kind: torch.dtype, before: Tensor, after: Tensor) -> Tensor:
    return ((before.to(kind) + after.to(kind)) / 2).float()


def mean_of_rounded(kind: torch.dtype, before: Tensor, after: Tensor) -> Tensor:
    """What DDP's hooks do: divide, once rounded, and add."""
    return (before.to(kind) / 2 + after.to(kind) / 2).float()


def train_rounded(kind: torch.dtype, reduce: Reduced) -> Truth:
    """Each share of the rows goes through a rounded copy of the weights; what is found is reduced and taken."""
    net = make_thirds()
    rounded = deepcopy(net).to(kind)
    truth, inner = Truth(nn.Module()), Truth(rounded)
    truth.net, truth.seen = net, inner.seen
    optimizer = make_optimizer(net)
    for step in range(STEPS):
        inner.step = step
        rounded.load_state_dict(net.state_dict())
        found = []
        for rank in range(2):
            x, slope = share_of(step, rank)
            out = rounded(x.to(kind))
            found.append(torch.autograd.grad(loss_of(out, slope), list(rounded.parameters())))
        for (name, parameter), *both in zip(truth.named(), *found, strict=True):
            for each in both:
                truth.add(f"{name}.local.grad", each)
            parameter.grad = reduce(*both)
        truth.take_gradients()
        truth.update(optimizer)
    return truth


# ---- in two ----


def train(rank: int, folder: Path, name: str) -> list[list[Tensor]]:
    """Returns the weights, recorded and not, and the reduced gradients of each step."""
    found, gradients = [], []
    for is_recorded in (True, False):
        torch.manual_seed(0)
        model = SPREAD[name](make_thirds())
        optimizer = make_optimizer(model)
        recording = record(model, folder / "runs" / name, sites=SITES) if is_recorded else None
        for step in range(STEPS):
            optimizer.zero_grad()
            x, slope = share_of(step, rank)
            loss_of(model(x), slope).backward()
            if not is_recorded:
                gradients += [whole(each.grad) for each in model.parameters()]
            optimizer.step()
        if recording is not None:
            recording.close()
        found.append([whole(each) for each in model.parameters()])
    return [*found, gradients]


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


def shard(net: nn.Sequential, *kinds: torch.dtype | None, is_offloaded: bool = False) -> nn.Module:
    policy = MixedPrecisionPolicy(*kinds)  # type: ignore[arg-type]
    offloaded = CPUOffloadPolicy(pin_memory=False) if is_offloaded else OffloadPolicy()
    mesh = init_device_mesh("cpu", (2,))
    for module in (net[0], net[2], net):
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offloaded)
    return net


def average(net: nn.Module, hook: Any, state: Any = None) -> nn.Module:
    model = DistributedDataParallel(net)
    model.register_comm_hook(state, hook)
    return model


def average_by_low_rank(net: nn.Module) -> nn.Module:
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
    return average(net, powerSGD_hook.powerSGD_hook, state)


class Way(NamedTuple):
    """How a net is spread, and what one process has to do for the same."""

    spread: Callable[[Any], nn.Module]
    kind: torch.dtype
    reduce: Reduced


WAYS = {
    "bf16": Way(lambda net: shard(net, BRAIN), BRAIN, partial(mean_in, SINGLE if TORCH >= (2, 15) else BRAIN)),
    "bf16, reduced in it": Way(lambda net: shard(net, BRAIN, BRAIN), BRAIN, partial(mean_in, BRAIN)),
    "bf16, reduced in float32": Way(lambda net: shard(net, BRAIN, SINGLE), BRAIN, partial(mean_in, SINGLE)),
    "fp16": Way(lambda net: shard(net, HALF, SINGLE), HALF, partial(mean_in, SINGLE)),
    "offloaded": Way(lambda net: shard(net, BRAIN, SINGLE, is_offloaded=True), BRAIN, partial(mean_in, SINGLE)),
    "hook": Way(lambda net: average(net, default_hooks.fp16_compress_hook), SINGLE, partial(mean_of_rounded, HALF)),
}
"""Where no dtype is named, torch reduces in that of the parameters from 2.15 on, in that of the gradients before. It
refuses the hook that rounds to bfloat16 without NCCL."""

SPREAD = {name: way.spread for name, way in WAYS.items()} | {"low rank": average_by_low_rank}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, list[Any]]:
    (folder / "runs").mkdir()
    works: dict[str, Work] = {name: partial(train, name=name) for name in SPREAD}
    return run_in_two(works, folder)


@pytest.mark.parametrize("name", WAYS)
def test_two_ranks_are_one_process_that_rounds(found: dict[str, list[Any]], folder: Path, name: str) -> None:
    run = open_run(folder / "runs" / name)
    assert_merged(run.history, train_rounded(WAYS[name].kind, WAYS[name].reduce))
    assert not run.history.disagreements
    assert not run.manifest["faults"]


@pytest.mark.parametrize("name", SPREAD)
def test_recording_changes_nothing(found: dict[str, list[Any]], name: str) -> None:
    for with_it, without, _ in found[name]:
        assert all(map(torch.equal, with_it, without))


def test_gradients_of_low_rank(found: dict[str, list[Any]], folder: Path) -> None:
    """Two steps are averaged, and from then on a matrix is one of rank 1; each is what is in ``.grad``."""
    history = open_run(folder / "runs" / "low rank").history
    gradients = found["low rank"][0][2][::4]
    assert [torch.linalg.matrix_rank(each).item() > 1 for each in gradients] == [True, True, False]
    series = history["0:weight.grad"]
    assert series.max.tolist() == [each.max().item() for each in gradients]
    assert series.l2.tolist() == pytest.approx([each.double().norm().item() for each in gradients])
