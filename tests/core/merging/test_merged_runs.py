"""Ranks that merge while they train leave one folder, which holds what a reader makes of all of theirs."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from retrograd.core.history.windows import LongRows, compare_copies
from retrograd.core.recording.record import record
from retrograd.core.runs.compaction import compact
from retrograd.explaining.findings.explain import explain
from tests.core.merging.comparing import assert_alike, list_names
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
from tests.processes import Work, run_together

pytestmark = pytest.mark.slow

SITES = ("*:output", "*:output.grad", "*:weight*", "*:bias*")
RANKS = 4


def shard(net: nn.Module, *sizes: int) -> nn.Module:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[: len(sizes)])
    for layer in net:  # type: ignore[union-attr]
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def train(rank: int, folder: Path, name: str, merge: bool, way: str, ranks: int) -> list[Tensor]:
    model = WAYS[way](make_net())
    optimizer = make_optimizer(model)
    with record(model, folder / "runs" / name, sites=SITES, merge_ranks=merge):
        for step in range(STEPS):
            optimizer.zero_grad()
            x, slope = data_of(step).chunk(ranks)[rank], slope_of(step).chunk(ranks)[rank]
            loss_of(model(x), slope).backward()
            optimizer.step()
    return [getattr(each, "full_tensor", lambda each=each: each)().detach() for each in model.parameters()]


WAYS: dict[str, Any] = {
    "ddp": DistributedDataParallel,
    "fsdp2": lambda net: shard(net, RANKS),
    "hsdp": lambda net: shard(net, 2, 2),
}


PASSES = (1, 2, 2, 1)


def accumulate(rank: int, folder: Path, name: str, merge: bool) -> None:
    """Each rank cuts its rows into as many micro-batches as it likes; all reduce in the last one."""
    model = DistributedDataParallel(make_net())
    optimizer = make_optimizer(model)
    with record(model, folder / "runs" / name, sites=SITES, merge_ranks=merge):
        for step in range(STEPS):
            optimizer.zero_grad()
            x, slope = data_of(step).chunk(RANKS)[rank], slope_of(step).chunk(RANKS)[rank]
            for left in reversed(range(PASSES[rank])):
                part, its = (each.chunk(PASSES[rank])[left] for each in (x, slope))
                with model.no_sync() if left else nullcontext():
                    (loss_of(model(part), its) / PASSES[rank]).backward()
            optimizer.step()


def reduce_and_leave(rank: int, folder: Path, name: str, merge: bool) -> None:
    """Some ranks have a pass more; two passes of each step are reduced. The last step has one, and no update."""
    model = DistributedDataParallel(make_net())
    optimizer = make_optimizer(model)
    with record(model, folder / "runs" / name, sites=SITES, merge_ranks=merge):
        for step in range(STEPS):
            optimizer.zero_grad()
            x, slope = data_of(step).chunk(RANKS)[rank], slope_of(step).chunk(RANKS)[rank]
            for left in reversed(range(PASSES[rank] + 1)):
                with model.no_sync() if left > 1 else nullcontext():
                    loss_of(model(x), slope).backward()
            optimizer.step()
        optimizer.zero_grad()
        loss_of(model(data_of(0)), slope_of(0)).backward()


def test_copies_are_told_in_steps_that_reduce_twice_or_have_no_update(tmp_path: Path) -> None:
    works: dict[str, Work] = {
        name: partial(reduce_and_leave, name=name, merge=merge) for name, merge in (("merged", True), ("apart", False))
    }
    run_together(works, tmp_path, RANKS)
    merged, apart = assert_alike(tmp_path / "runs" / "merged", tmp_path / "runs" / "apart")
    n = make_net()[0].weight.numel()
    assert merged.history["0:weight.grad"].count.tolist() == [2 * n] * STEPS + [n]
    assert not merged.history.disagreements
    assert not apart.history.disagreements


def test_ranks_with_different_numbers_of_micro_batches_are_one_process(tmp_path: Path) -> None:
    works: dict[str, Work] = {
        name: partial(accumulate, name=name, merge=merge) for name, merge in (("merged", True), ("apart", False))
    }
    run_together(works, tmp_path, RANKS)
    merged, apart = assert_alike(tmp_path / "runs" / "merged", tmp_path / "runs" / "apart")
    assert_merged(merged.history, train_whole(), factor=lambda site: RANKS if site.endswith(":output.grad") else 1.0)
    assert not merged.history.disagreements
    assert not apart.history.disagreements
    long = LongRows(apart.history.rows.parts, None, {}, apart.history.rows.copies)
    assert not compare_copies(long)
    compact(tmp_path / "runs" / "apart")
    assert_alike(tmp_path / "runs" / "merged", tmp_path / "runs" / "apart")


def test_one_folder_holds_what_the_reader_makes_of_four(tmp_path: Path) -> None:
    works: dict[str, Work] = {
        f"{way}-{merge}": partial(train, name=f"{way}-{merge}", merge=merge, way=way, ranks=RANKS)
        for way in WAYS
        for merge in (False, True)
    }
    found = run_together(works, tmp_path, RANKS)
    for way in WAYS:
        assert list_names(tmp_path / "runs" / f"{way}-True") == ["rank00000"]
        one, four = assert_alike(tmp_path / "runs" / f"{way}-True", tmp_path / "runs" / f"{way}-False")
        assert one.status == "finished"
        assert {each.detector for each in explain(one)} <= {each.detector for each in explain(four)}
        assert one.manifest["merged"] == {"ranks": [0, 1, 2, 3], "lost": {}, "late": 0, "differing": {}}
        for with_it, without in zip(found[f"{way}-True"], found[f"{way}-False"], strict=True):
            assert all(map(torch.equal, with_it, without))
        assert_merged(one.history, train_whole(), sites=[f"{part}:output" for part in ("0", "1", "2", "self")])
        assert_merged(one.history, train_whole(), sites=["0:weight.grad", "2:weight.grad", "2:bias.update"])
