"""DDP in two processes: what both hold counts once, and gradients are those that the optimizer gets."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from retrograd.core.recording.record import record
from retrograd.core.runs.reader import open_run
from tests.core.recording.spread import (
    STEPS,
    assert_merged,
    data_of,
    loss_of,
    make_net,
    make_optimizer,
    slope_of,
    train_whole,
)
from tests.processes import Work, run_in_two

pytestmark = pytest.mark.slow

SITES = ("*:output", "*:output.grad", "*:weight*", "*:bias*")


def mine(step: int, rank: int) -> tuple[Tensor, Tensor]:
    return data_of(step).chunk(2)[rank], slope_of(step).chunk(2)[rank]


def weights_of(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def watch(model: nn.Module, folder: Path, name: str, **choices: Any) -> Any:
    return record(model, folder / "runs" / name, **{"sites": SITES, **choices}) if name else nullcontext()


def train(rank: int, folder: Path, name: str, **options: Any) -> list[Tensor]:
    model = DistributedDataParallel(make_net(), **options)
    optimizer = make_optimizer(model)
    with watch(model, folder, name):
        for step in range(STEPS):
            optimizer.zero_grad()
            x, slope = mine(step, rank)
            loss_of(model(x), slope).backward()
            optimizer.step()
    return weights_of(model)


def train_inner(rank: int, folder: Path, name: str) -> list[Tensor]:
    """The net is recorded, and the wrapper made afterwards; gradients are zeroed in place."""
    net = make_net()
    with watch(net, folder, name):
        model = DistributedDataParallel(net)
        optimizer = make_optimizer(model)
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            x, slope = mine(step, rank)
            loss_of(model(x), slope).backward()
            with torch.no_grad():
                model(x)
            optimizer.step()
    return weights_of(model)


def accumulate(rank: int, folder: Path, name: str, synced: bool) -> list[Tensor]:
    """Two passes a step: reduced each, or the first under ``no_sync``."""
    model = DistributedDataParallel(make_net())
    optimizer = make_optimizer(model)
    with watch(model, folder, name, sites=[*SITES, "*:*.local.grad"] if not synced else SITES):
        for step in range(STEPS):
            optimizer.zero_grad()
            x, slope = mine(step, rank)
            for index, (part, its) in enumerate(zip(x.chunk(2), slope.chunk(2), strict=True)):
                with model.no_sync() if index == 0 and not synced else nullcontext():
                    loss_of(model(part), its).backward()
            optimizer.step()
    return weights_of(model)


class Forked(nn.Module):
    """Uses one of two layers, as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = make_net()[0], make_net()[0]

    def forward(self, x: Tensor, take_left: bool) -> Tensor:
        out: Tensor = self.left(x) if take_left else self.right(x)
        return out


def leave_out(rank: int, folder: Path, name: str) -> dict[str, list[Tensor]]:
    """In step 0 all use the left layer; in step 1 one rank does and the other does not."""
    model = DistributedDataParallel(Forked(), find_unused_parameters=True)
    optimizer = make_optimizer(model)
    found: dict[str, list[Tensor]] = {"left": [], "right": []}
    with watch(model, folder, name):
        for step in range(2):
            optimizer.zero_grad()
            out = model(mine(step, rank)[0], step == 0 or rank == 1)
            (out.sum() / 4).backward()
            for each, gradients in found.items():
                gradient = getattr(model.module, each).weight.grad
                gradients.append(torch.zeros(0) if gradient is None else gradient.clone())
            optimizer.step()
    return found


def run_uneven(rank: int, folder: Path, name: str) -> list[list[Tensor]]:
    """Rank 1 has fewer batches than rank 0."""
    model = DistributedDataParallel(make_net())
    optimizer = make_optimizer(model)
    found = []
    with watch(model, folder, name), model.join():
        for step in range(3 - rank):
            optimizer.zero_grad()
            x, slope = mine(step, rank)
            loss_of(model(x), slope).backward()
            found.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
            optimizer.step()
    return found


def pass_twice(rank: int, folder: Path, name: str) -> list[Tensor]:
    """A second pass over the same forward is not reduced, and neither is ``autograd.grad``."""
    model = DistributedDataParallel(make_net())
    with watch(model, folder, name):
        x, slope = mine(0, rank)
        loss = loss_of(model(x), slope)
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward(retain_graph=True)
        reduced = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        loss.backward()
    return reduced


def part_ways(rank: int, folder: Path, name: str) -> list[Tensor]:
    """Ranks that change their weights by themselves."""
    model = DistributedDataParallel(make_net())
    optimizer = make_optimizer(model)
    with watch(model, folder, name):
        for step in range(STEPS):
            optimizer.zero_grad()
            x, slope = mine(step, rank)
            loss_of(model(x), slope).backward()
            optimizer.step()
            with torch.no_grad():
                model.module[2].bias.add_(rank * (step == 0))
    return weights_of(model)


PLAIN: dict[str, dict[str, Any]] = {
    "ddp": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "buckets": {"bucket_cap_mb": 1e-4},
}
WORKS: dict[str, Work] = {
    **{name: partial(train, name=name, **options) for name, options in PLAIN.items()},
    "bare": partial(train, name=""),
    "inner": partial(train_inner, name="inner"),
    "synced": partial(accumulate, name="synced", synced=True),
    "gathered": partial(accumulate, name="gathered", synced=False),
    "forked": partial(leave_out, name="forked"),
    "uneven": partial(run_uneven, name="uneven"),
    "twice": partial(pass_twice, name="twice"),
    "apart": partial(part_ways, name="apart"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, list[Any]]:
    (folder / "runs").mkdir()
    return run_in_two(WORKS, folder)


@pytest.fixture
def runs(found: dict[str, list[Any]], folder: Path) -> Path:
    return folder / "runs"


def double_gradients(site: str) -> float:
    """Each rank divides by half as many rows; only for parameters is that made good by the mean."""
    return 2.0 if site.endswith(":output.grad") else 1.0


@pytest.mark.parametrize("name", [*PLAIN, "inner"])
def test_two_ranks_are_one_process(runs: Path, name: str) -> None:
    run = open_run(runs / name)
    assert_merged(run.history, train_whole(), factor=double_gradients)
    assert not run.history.disagreements
    facts = [rank.placements.sites for rank in run.ranks]
    assert [each["0:weight.grad"] for each in facts] == [{"holds": "copy", "ranks": [0, 1]}] * 2
    assert [each["0:output"] for each in facts] == [{"holds": "own", "ranks": [rank]} for rank in range(2)]


@pytest.mark.parametrize("name", [*PLAIN, "inner"])
def test_recording_changes_nothing(found: dict[str, list[Any]], name: str) -> None:
    for mine, bare in zip(found[name][0], found["bare"][0], strict=True):
        assert torch.equal(mine, bare)


def test_each_rank_by_itself(runs: Path) -> None:
    history = open_run(runs / "ddp").history
    both = history["0:weight.update"]
    assert both.count.tolist() == [32] * STEPS
    assert both.select(rank=1).l2.tolist() == both.select(rank=0).l2.tolist() == both.l2.tolist()
    assert history["0:output"].select(rank=1).count.tolist() == [32] * STEPS
    assert sorted(set(history["0:weight.update"].rows["rank"])) == [0, 1]


def test_gradients_that_are_reduced_in_each_pass(runs: Path) -> None:
    """Each has a row of its own, as in one process; together they are what the optimizer gets."""
    history = open_run(runs / "synced").history
    whole = train_whole(halves=2)
    for site in ("0:weight.grad", "2:bias.grad"):
        series = history[site]
        assert series.rows["micro"].tolist() == [0, 1] * STEPS * 2
        parts = [series.select(micro=micro, rank=0) for micro in range(2)]
        total = [each[0].sum().item() for each in whole.seen[site].values()]
        assert [sum(part.mean[at] * part.count[at] for part in parts) for at in range(STEPS)] == pytest.approx(total)


def test_gradients_that_gather_before_they_are_reduced(runs: Path) -> None:
    """What one rank found by itself is never shown as the gradient."""
    history = open_run(runs / "gathered").history
    whole = train_whole(halves=2)
    assert_merged(history, whole, sites=["0:weight.grad", "2:bias.grad", "0:weight.update", "0:weight"])
    assert set(history["0:weight.grad"].rows["micro"]) == {1}
    local = history["0:weight.local.grad"]
    assert local.select(rank=1).rows["micro"].tolist() == [0, 1] * STEPS
    assert local.count.tolist() == [4 * 32] * STEPS


def test_parameters_that_some_ranks_do_not_use(found: dict[str, list[Any]], runs: Path) -> None:
    history = open_run(runs / "forked").history
    for name in ("left", "right"):
        for step, gradient in enumerate(found["forked"][0][name]):
            if gradient.numel():
                at = history[f"{name}:weight.grad"].steps.tolist().index(step)
                assert history[f"{name}:weight.grad"].max[at] == gradient.max()
                assert history[f"{name}:weight.grad"].count[at] == gradient.numel()
    assert history["right:weight.grad"].steps.tolist() == [1]


def test_ranks_that_have_run_out_of_data(found: dict[str, list[Any]], runs: Path) -> None:
    history = open_run(runs / "uneven").history
    assert history["0:weight.grad"].steps.tolist() == [0, 1, 2]
    assert history["0:weight.grad"].max.tolist() == [each[0].max().item() for each in found["uneven"][0]]
    assert history["0:weight.grad"].count.tolist() == [32] * 3
    assert history["0:output"].count.tolist() == [64, 64, 32]


def test_passes_that_are_not_reduced(found: dict[str, list[Any]], runs: Path) -> None:
    history = open_run(runs / "twice").history
    series = history["0:weight.grad"].select(backward=None)
    assert series.rows["backward"].tolist() == [1, 1]
    assert series.max.tolist() == [found["twice"][0][0].max().item()]


def test_copies_that_differ_are_told_of(runs: Path) -> None:
    run = open_run(runs / "apart")
    told = {each.site: each[1:] for each in run.history.disagreements}
    assert told["2:bias"] == (1, 0, 1)
    with pytest.warns(UserWarning, match=r"Ranks 0 and 1 hold copies of '2:bias' that differ from step 1 on"):
        assert run.history["2:bias"].count.tolist() == [4] * STEPS
    assert run.history["2:bias"].mean.tolist() == run.history["2:bias"].select(rank=0).mean.tolist()
