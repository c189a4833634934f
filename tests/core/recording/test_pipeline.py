"""Stages of a pipeline: each has its own names, and the micro-batches that are under way at once are calls."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.nn.parallel import DistributedDataParallel

from retrograd.core.recording.record import record
from retrograd.core.runs.reader import open_run
from tests.core.recording.spread import (
    ROWS,
    STEPS,
    Truth,
    assert_merged,
    data_of,
    loss_of,
    make_optimizer,
    slope_of,
    whole_numbers,
)
from tests.processes import Work, run_in_two, run_together

pytestmark = pytest.mark.slow

PARTS = 4
SITES = ("*:output", "*:output.grad", "*:weight*", "*:bias*")


def make_stages(count: int) -> list[nn.Module]:
    """Layers of the whole model, two a stage, each called ``0`` and ``1`` within it."""
    layers = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()).double() for _ in range(count)]
    for number, parameter in enumerate(each for layer in layers for each in layer.parameters()):
        with torch.no_grad():
            parameter.copy_(whole_numbers(*parameter.shape, seed=number) / 8)
    return list(layers)


def run(schedule: Any, rank: int, step: int) -> None:
    """The first process has the data, the last what the loss needs; both have both where stages are interleaved."""
    x, slope = (data_of(step),) if rank == 0 else (), slope_of(step)
    schedule.step(*x, target=slope) if rank == 1 else schedule.step(*x)


def train(rank: int, folder: Path, name: str, kind: Any) -> list[Tensor]:
    weights = []
    for is_recorded in (True, False):
        part = make_stages(2)[rank]
        stage = PipelineStage(part, rank, 2, torch.device("cpu"))
        schedule = kind(stage, PARTS, loss_fn=loss_of)
        optimizer = make_optimizer(part)
        recording = record(part, folder / "runs" / name, sites=SITES, tensors="0:output") if is_recorded else None
        for step in range(STEPS):
            optimizer.zero_grad()
            run(schedule, rank, step)
            optimizer.step()
        if recording is not None:
            recording.close()
        weights.append([each.detach().clone() for each in part.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    return weights[0]


def interleave(rank: int, folder: Path, name: str) -> list[Tensor]:
    """Two stages in each process, recorded as two models."""
    layers = make_stages(4)
    numbers = (rank, rank + 2)
    parts = {"early": layers[numbers[0]], "late": layers[numbers[1]]}
    stages = [PipelineStage(layers[number], number, 4, torch.device("cpu")) for number in numbers]
    schedule = ScheduleInterleaved1F1B(stages, PARTS, loss_fn=loss_of)
    optimizer = make_optimizer(nn.ModuleList(parts.values()))
    with record(parts, folder / "runs" / name, sites=SITES):
        for step in range(STEPS):
            optimizer.zero_grad()
            run(schedule, rank, step)
            optimizer.step()
    return []


def split_backward(rank: int, folder: Path, name: str) -> list[Tensor]:
    """A zero-bubble schedule runs the two halves of a backward pass apart."""
    numbers = (rank, rank + 2)
    layers = make_stages(4)
    stages = [PipelineStage(layers[number], number, 4, torch.device("cpu")) for number in numbers]
    schedule = ScheduleInterleavedZeroBubble(stages, PARTS, loss_fn=loss_of)
    parts = {f"part{number}": layers[number] for number in numbers}
    optimizer = make_optimizer(nn.ModuleList(parts.values()))
    with record(parts, folder / "runs" / name, sites=SITES):
        for step in range(STEPS):
            optimizer.zero_grad()
            x = (data_of(step),) if rank == 0 else ()
            has_loss = 3 in numbers
            schedule.step(*x, target=slope_of(step)) if has_loss else schedule.step(*x)
            optimizer.step()
    return []


class Whole(nn.Module):
    """A model of which each stage keeps the layers that are its own, under the names that they have in the whole."""

    def __init__(self) -> None:
        super().__init__()
        stages = make_stages(2)
        self.layers = nn.ModuleDict({str(at): stage for at, stage in enumerate(stages)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def keep_names(rank: int, folder: Path, name: str) -> list[Tensor]:
    part = Whole()
    del part.layers[str(1 - rank)]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, PARTS, loss_fn=loss_of)
    optimizer = make_optimizer(part)
    with record(part, folder / "runs" / name, sites=SITES):
        for step in range(STEPS):
            optimizer.zero_grad()
            run(schedule, rank, step)
            optimizer.step()
    return []


def replicate(rank: int, folder: Path, name: str) -> list[Tensor]:
    """Two pipelines of two stages; a stage of both is one model under DDP or FSDP2."""
    mesh: Any = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    at, share = mesh.get_local_rank("stage"), mesh.get_local_rank("data")
    part: nn.Module = make_stages(2)[at]
    if name == "under FSDP2":
        part = fully_shard(part, mesh=mesh["data"])
    else:
        part = DistributedDataParallel(part, process_group=mesh.get_group("data"))
    stage = PipelineStage(part, at, 2, torch.device("cpu"), group=mesh.get_group("stage"))
    schedule = Schedule1F1B(stage, PARTS, loss_fn=loss_of)
    optimizer = make_optimizer(part)
    with record(part, folder / "runs" / name, sites=SITES):
        for step in range(STEPS):
            optimizer.zero_grad()
            x, slope = (each.chunk(2)[share] for each in (data_of(step), slope_of(step)))
            schedule.step(*((x,) if at == 0 else ()), **({"target": slope} if at == 1 else {}))
            optimizer.step()
    return []


def train_in_one(count: int, replicas: int = 0, net: nn.Module | None = None) -> Truth:
    """The whole model in one process; an optimizer gets the mean over the parts of a batch, as torch's stages do.

    Without replicas each part is a gradient of its own; with them there is one of all: the mean over the replicas.
    """
    layers = (layer for stage in make_stages(count) for layer in stage.children())
    truth = Truth(net or nn.Sequential(*layers))
    optimizer = make_optimizer(truth.net)
    for name, parameter in () if replicas else truth.named():
        parameter.register_hook(lambda gradient, name=name: truth.add(f"{name}.grad", gradient))
    for step in range(STEPS):
        optimizer.zero_grad()
        chunks = (each.chunk(PARTS * (replicas or 1)) for each in (data_of(step), slope_of(step)))
        for x, slope in zip(*chunks, strict=True):
            loss_of(truth.net(x), slope).backward()
        for name, parameter in truth.named():
            assert parameter.grad is not None
            if replicas:
                parameter.grad /= replicas
                truth.add(f"{name}.grad", parameter.grad)
            parameter.grad /= PARTS
        truth.update(optimizer)
    return truth


def rename(truth: Truth, names: dict[str, str]) -> Truth:
    """What was seen at each layer, by its name in its stage; a stage returns what its last layer does."""
    seen = {}
    for site, steps in truth.seen.items():
        path, _, slot = site.partition(":")
        if path != "self":
            seen[f"{names[path]}:{slot}"] = steps
            if slot.startswith("output") and int(path) % 2:
                seen[f"{names[path].removesuffix('.1')}:{slot}"] = steps
    truth.seen = seen  # type: ignore[assignment]
    return truth


SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    (folder / "runs").mkdir()
    works: dict[str, Work] = {name: partial(train, name=name, kind=kind) for name, kind in SCHEDULES.items()}
    more = {"interleaved": interleave, "zero bubble": split_backward, "named": keep_names}
    works |= {name: partial(work, name=name) for name, work in more.items()}
    run_in_two(works, folder)
    return folder / "runs"


WITHIN = ("under DDP", "under FSDP2")


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    (folder / "runs").mkdir()
    run_together({name: partial(replicate, name=name) for name in WITHIN}, folder, 4)
    return folder / "runs"


@pytest.mark.parametrize("name", SCHEDULES)
def test_two_stages_are_one_model(runs: Path, name: str) -> None:
    found = open_run(runs / name)
    truth = rename(
        train_in_one(2), {str(2 * stage + at): f"stage{stage}.{at}" for stage in range(2) for at in range(2)}
    )
    assert_merged(found.history, truth)
    assert {site.partition("#")[0].partition(":")[0] for site in found.history.sites} == {
        f"stage{stage}{layer}" for stage in range(2) for layer in ("", ".0", ".1")
    }
    assert not found.manifest["faults"]
    assert not found.manifest["not_recorded"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_micro_batch_is_a_call(runs: Path, name: str) -> None:
    history = open_run(runs / name).history
    for call in range(1, PARTS + 1):
        part = data_of(0).chunk(PARTS)[call - 1]
        output = history[f"stage0.0#{call}:output"]
        assert output.count.tolist() == [ROWS] * STEPS
        assert torch.equal(output.tensors[0].tensor, make_stages(2)[0].get_submodule("0")(part).detach())
        assert history[f"stage1.0#{call}:output.grad"].count.tolist() == [ROWS] * STEPS
    assert set(history["stage1.0:weight.grad"].rows["micro"]) == {0}


def test_several_stages_in_a_process(runs: Path) -> None:
    history = open_run(runs / "interleaved").history
    models = ["early", "early", "late", "late"]
    names = {str(2 * stage + at): f"stage{stage}.{models[stage]}.{at}" for stage in range(4) for at in range(2)}
    assert_merged(history, rename(train_in_one(4), names))


def test_a_backward_pass_in_two_halves(runs: Path) -> None:
    found = open_run(runs / "zero bubble")
    names = {str(2 * stage + at): f"part{stage}.{at}" for stage in range(4) for at in range(2)}
    assert_merged(found.history, rename(train_in_one(4), names))
    assert not found.manifest["faults"]


def test_stages_that_keep_the_names_of_the_whole_model(runs: Path) -> None:
    found = open_run(runs / "named")
    truth = train_in_one(2, net=Whole())
    paths = {site.partition("#")[0].partition(":")[0] for site in found.history.sites}
    assert paths == {f"layers.{at}{inner}" for at in range(2) for inner in ("", ".0", ".1")} | {"stage0", "stage1"}
    assert_merged(found.history, truth, sites=[site for site in truth.seen if not site.startswith("self:")])
    assert found.history["stage1:output"].max.tolist() == [
        max(each.max().item() for each in parts) for parts in truth.seen["self:output"].values()
    ]


@pytest.mark.parametrize("name", WITHIN)
def test_stages_that_are_replicated(four: Path, name: str) -> None:
    found = open_run(four / name)
    names = {str(2 * stage + at): f"stage{stage}.{at}" for stage in range(2) for at in range(2)}
    assert_merged(found.history, rename(train_in_one(2, replicas=2), names))
    assert not found.history.disagreements
    assert not found.manifest["faults"]
    assert not found.manifest["not_recorded"]
