"""FSDP2, HSDP, tensor parallelism, DDP: parts are put together, and what several processes hold counts once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from retrograd.core.recording.record import record
from retrograd.core.runs.reader import open_run
from tests.core.recording.spread import (
    STEPS,
    Talk,
    Truth,
    assert_merged,
    data_of,
    loss_of,
    make_net,
    make_optimizer,
    slope_of,
    train_whole,
)
from tests.processes import Work, run_in_two, run_together

pytestmark = pytest.mark.slow

UNEVEN = 5
"""A width of which the last process gets fewer rows than the others, or none."""

SITES = ("*:*",)

OWN = "*:*.local.grad"


def mesh_of(*sizes: int) -> Any:
    names = ("outer", "inner")[: len(sizes)]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def train(rank: int, folder: Path, name: str, spread: Callable[[Any], nn.Module], shares: int) -> list[Tensor]:
    """Each process takes its share of the rows: those in one share have the same."""
    weights, talks = [], []
    sites = [*SITES, OWN] if name in RANKS_OWN else SITES
    for is_recorded in (True, False):
        model: nn.Module = make_net()
        recording = None
        if is_recorded and name.startswith("early"):
            recording = record(model, folder / "runs" / name, sites=sites)
        model = spread(model)
        if is_recorded and recording is None:
            recording = record(model, folder / "runs" / name, sites=sites)
        optimizer = make_optimizer(model)
        share = rank * shares // torch.distributed.get_world_size()
        with Talk() as talk:
            for step in range(STEPS):
                optimizer.zero_grad()
                x, slope = (each.chunk(shares)[share] for each in (data_of(step), slope_of(step)))
                out = model(x)
                loss_of(whole(out), slope).backward()
                optimizer.step()
            if recording is not None:
                recording.close()
        talks.append(talk.counts)
        weights.append(
            [
                each.full_tensor().detach() if hasattr(each, "full_tensor") else each.detach()
                for each in model.parameters()
            ]
        )
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    assert talks[0] == talks[1]  # recording asks nothing of other processes
    assert sum(talks[0].values()) >= STEPS
    return weights[0]


def shard(net: nn.Sequential, *sizes: int, leaves: bool = True, **options: Any) -> nn.Module:
    mesh = mesh_of(*sizes)
    for module in (net[0], net[2]) if leaves else ():
        fully_shard(module, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def split(net: nn.Sequential, *, local: bool = True, mesh: Any = None) -> nn.Module:
    plan = {"0": ColwiseParallel(use_local_output=local), "2": RowwiseParallel(use_local_output=local)}
    return parallelize_module(net, mesh or mesh_of(2), plan)


def split_otherwise(net: nn.Sequential) -> nn.Module:
    """By rows first, then by columns, and put together."""
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate()),
        "2": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(net, mesh_of(2), plan)


def split_middle(net: nn.Sequential) -> nn.Module:
    """The first layer is whole in each process, with plain parameters."""
    plan = {"2": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(net, mesh_of(2), plan)


def split_and_shard(net: nn.Sequential, *, all_split: bool = True, shards: int = 2, copies: int = 0) -> nn.Module:
    """Tensor parallelism within FSDP2; with ``copies``, within HSDP."""
    sizes = (copies, shards, 2) if copies else (shards, 2)
    names = ("copies", "outer", "inner") if copies else ("outer", "inner")
    mesh: Any = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    if all_split:
        split(net, mesh=mesh["inner"])
    else:
        parallelize_module(net, mesh["inner"], {"2": ColwiseParallel(output_layouts=Replicate())})
    data = mesh["copies", "outer"] if copies else mesh["outer"]
    for module in (net[0], net[2]):
        fully_shard(module, mesh=data)
    return fully_shard(net, mesh=data)


def replicate_whole(net: nn.Sequential) -> nn.Module:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(net, mesh=mesh_of(2))


def gather(rank: int, folder: Path, name: str) -> list[Tensor]:
    """FSDP2 that reduces only in the second pass of a step, and in another run in both."""
    model: Any = shard(make_net(), 2)
    optimizer = make_optimizer(model)
    with record(model, folder / "runs" / name, sites=SITES):
        for step in range(STEPS):
            optimizer.zero_grad()
            x, slope = (each.chunk(2)[rank] for each in (data_of(step), slope_of(step)))
            for index, (part, its) in enumerate(zip(x.chunk(2), slope.chunk(2), strict=True)):
                model.set_requires_gradient_sync(index == 1 or step > 0)
                loss_of(model(part), its).backward()
            optimizer.step()
    return []


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)
        self.up, self.act, self.down = nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.up(self.norm(self.stem(x)))))
        return out


def split_sequence(rank: int, folder: Path, name: str) -> list[Tensor]:
    plan = {
        "stem": ColwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    model = parallelize_module(Sequence(), mesh_of(2), plan)
    optimizer = make_optimizer(model)
    with record(model, folder / "runs" / name, sites=[*SITES, OWN]):
        for step in range(STEPS):
            optimizer.zero_grad()
            model(data_of(step).float().view(2, 4, 4)).square().mean().backward()
            optimizer.step()
    return []


def prepare_inputs(rank: int, folder: Path, name: str) -> list[Tensor]:
    """Inputs that are ``DTensor``s, and are recorded and kept as such."""
    prepare = PrepareModuleInput(input_layouts=Shard(-1), desired_input_layouts=Replicate(), use_local_output=False)
    net = parallelize_module(make_net(), mesh_of(2), {"0": ColwiseParallel(), "1": prepare})
    sites = ["0:output", "1:input*", "1:output"]
    with record(net, folder / "runs" / name, sites=sites, tensors="1:output"):
        hidden = net[1](net[0](data_of(0)))
        whole(hidden).sum().backward()
    return [whole(hidden).detach()]


TWO: dict[str, tuple[Callable[[Any], nn.Module], int]] = {
    "fsdp": (lambda net: shard(net, 2, leaves=False), 2),
    "leaves": (lambda net: shard(net, 2), 2),
    "kept": (lambda net: shard(net, 2, reshard_after_forward=False), 2),
    "columns": (split, 1),
    "spread": (partial(split, local=False), 1),
    "rows": (split_otherwise, 1),
    "middle": (split_middle, 1),
    "early": (lambda net: shard(net, 2), 2),
    "early columns": (split, 1),
    "early rows": (split_otherwise, 1),
    "replicated": (replicate_whole, 2),
    "offloaded": (lambda net: shard(net, 2, offload_policy=CPUOffloadPolicy(pin_memory=False)), 2),
}
FOUR: dict[str, tuple[Callable[[Any], nn.Module], int]] = {
    "ddp": (DistributedDataParallel, 4),
    "quarters": (lambda net: shard(net, 4), 4),
    "uneven": (lambda net: shard(make_net(UNEVEN), 4), 4),
    "hybrid": (lambda net: shard(net, 2, 2), 4),
    "both": (split_and_shard, 2),
    "mixed": (partial(split_and_shard, all_split=False), 2),
    "hybrid split": (partial(split_and_shard, copies=2, shards=1), 2),
}
EIGHT: dict[str, tuple[Callable[[Any], nn.Module], int]] = {"all three": (partial(split_and_shard, copies=2), 4)}
RANKS_OWN = {
    "ddp", "fsdp", "leaves", "kept", "early", "offloaded", "quarters", "uneven", "hybrid", "both", "mixed", "all three"
}  # fmt: skip
"""Runs in which what each process finds before the reduction is recorded."""

WITH_ADDENDS = {"rows", "early rows", "middle", "mixed"}
"""Runs in which the last layer takes a copy of its input, so that each process finds an addend of its gradient."""


def train_named(rank: int, folder: Path, name: str) -> list[Tensor]:
    spread, shares = {**TWO, **FOUR, **EIGHT}[name]
    return train(rank, folder, name, spread, shares)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    (folder / "runs").mkdir()
    works: dict[str, Work] = {name: partial(train_named, name=name) for name in TWO}
    works |= {
        "gathered": partial(gather, name="gathered"),
        "sequence": partial(split_sequence, name="sequence"),
        "inputs": partial(prepare_inputs, name="inputs"),
    }
    run_in_two(works, folder)
    return folder / "runs"


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    (folder / "runs").mkdir()
    run_together({name: partial(train_named, name=name) for name in FOUR}, folder, 4)
    return folder / "runs"


def assert_whole(runs: Path, name: str, shares: int) -> None:
    run = open_run(runs / name)
    net = make_net(UNEVEN) if name == "uneven" else make_net()
    truth = train_whole(net, shares=shares if name in RANKS_OWN else 0, inputs=True)
    addends = {"2:input.input.grad"} if name in WITH_ADDENDS else set()

    def mean_of_share(site: str) -> float:
        return shares if site.endswith("put.grad") else 1

    assert_merged(run.history, truth, factor=mean_of_share, sites=sorted(set(truth.seen) - addends))
    assert not run.history.disagreements
    told = {each["site"] for each in run.manifest["not_recorded"]}
    assert told == {"self:input.input.grad", "0:input.input.grad"} | addends
    assert not addends & set(run.history.sites)
    assert not run.manifest["faults"]


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_are_one_process(two: Path, name: str) -> None:
    assert_whole(two, name, TWO[name][1])


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_are_one_process(four: Path, name: str) -> None:
    assert_whole(four, name, FOUR[name][1])


@pytest.mark.thorough
def test_copies_of_shards_of_parts_are_one_process(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    run_together({name: partial(train_named, name=name) for name in EIGHT}, tmp_path, 8)
    assert_whole(tmp_path / "runs", "all three", 4)


def test_gradients_that_gather_before_they_are_reduced(two: Path) -> None:
    """In step 0 nothing is reduced in the first pass; from then on both passes are."""
    history = open_run(two / "gathered").history
    series, truth = history["0:weight.grad"], train_whole(halves=2)
    parts = [[series.select(micro=micro, rank=rank) for rank in range(2)] for micro in range(2)]
    assert [[part.steps.tolist() for part in both] for both in parts] == [[[1, 2]] * 2, [[0, 1, 2]] * 2]
    total = [each[0].sum().item() for each in truth.seen["0:weight.grad"].values()]
    sums = [{step: m * n for step, m, n in zip(p.steps, p.mean, p.count, strict=True)} for both in parts for p in both]
    assert [sum(each.get(step, 0) for each in sums) for step in range(STEPS)] == pytest.approx(total)
    assert series.max[0] == truth.seen["0:weight.grad"][0][0].max()
    assert_merged(history, truth, sites=["0:weight.update", "2:bias"])


def test_a_sum_that_nobody_has_formed(two: Path) -> None:
    """Under sequence parallelism each process finds a summand of the gradient of a norm: no more is recorded of it."""
    run = open_run(two / "sequence")
    torch.manual_seed(0)
    truth = Truth(Sequence())
    optimizer = make_optimizer(truth.net)
    for step in range(STEPS):
        optimizer.zero_grad()
        truth.net(data_of(step).float().view(2, 4, 4)).square().mean().backward()
        truth.take_gradients()
        truth.update(optimizer)
    summed = {"norm:weight.grad", "norm:bias.grad"}
    assert_merged(run.history, truth, is_exact=False, sites=sorted(set(truth.seen) - summed))
    assert not summed & set(run.history.sites)
    reasons = {each["site"]: each["reason"] for each in run.manifest["not_recorded"]}
    assert set(reasons) - {"up:input.input.grad"} == {*summed, "self:input.x.grad", "stem:input.input.grad"}
    assert "summand" in reasons["norm:weight.grad"]
    local = run.history["norm:weight.local.grad"]
    both = [local.select(rank=rank).mean for rank in range(2)]
    total = [each[0].mean().item() for each in truth.seen["norm:weight.grad"].values()]
    assert (both[0] + both[1]).tolist() == pytest.approx(total, rel=1e-5)
    assert run.ranks[1].placements.sites["norm:weight.local.grad"]["holds"] == "summand"


def test_spread_inputs_and_kept_tensors(two: Path) -> None:
    history = open_run(two / "inputs").history
    net = make_net()
    before = net[0](data_of(0))
    assert history["1:input.input"].count.tolist() == [before.numel()]
    assert history["1:input.input"].max.tolist() == [before.max().item()]
    assert torch.equal(history["1:output"].tensors[0].tensor, before.relu().detach())


def test_what_each_rank_holds(two: Path, four: Path) -> None:
    def facts(folder: Path, site: str) -> list[tuple[str, list[int]]]:
        return [
            (each["holds"], each["ranks"]) for each in (rank.placements.sites[site] for rank in open_run(folder).ranks)
        ]

    assert facts(two / "leaves", "0:weight.grad") == [("shard", [0]), ("shard", [1])]
    assert facts(two / "leaves", "0:output") == [("own", [0]), ("own", [1])]
    assert facts(two / "columns", "0:output") == [("shard", [0]), ("shard", [1])]
    assert facts(two / "columns", "1:output.grad") == [("shard", [0]), ("shard", [1])]
    assert facts(two / "columns", "2:output") == [("copy", [0, 1])] * 2
    assert facts(two / "middle", "0:weight.grad") == [("copy", [0, 1])] * 2
    assert facts(four / "hybrid", "0:weight") == [("shard", [0, 2]), ("shard", [1, 3])] * 2
    assert facts(four / "both", "0:weight") == [("shard", [rank]) for rank in range(4)]
    assert facts(four / "both", "2:output") == [("copy", [0, 1])] * 2 + [("copy", [2, 3])] * 2
