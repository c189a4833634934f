"""Ranks that merge while they train leave one folder, which holds what a reader makes of all of theirs."""

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

from retrograd.findings.explain import explain
from retrograd.recording.record import record
from tests.merging.comparing import assert_alike, list_names
from tests.processes import Work, run_together
from tests.recording.spread import (
    STEPS,
    assert_merged,
    data_of,
    loss_of,
    make_net,
    make_optimizer,
    slope_of,
    train_whole,
)

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
