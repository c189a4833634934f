"""Ways to train under merged ranks beside the plain one: each merges to what a reader makes of folders of ranks."""

from __future__ import annotations

import itertools
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from retrograd.core.launch import closing
from retrograd.core.merging import node
from retrograd.core.recording.record import record
from retrograd.core.runs.reader import open_run
from tests.core.merging.comparing import assert_alike, list_names
from tests.core.recording.spread import STEPS, data_of, loss_of, make_net, make_optimizer, slope_of
from tests.processes import Work, run_in_two

pytestmark = pytest.mark.slow

SITES = ("*:output", "*:output.grad", "*:weight*")


def parallelize(net: nn.Module) -> nn.Module:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(net, init_device_mesh("cpu", (2,)), plan)


def train(rank: int, folder: Path, name: str, merge: bool, is_spread: bool = False) -> int:
    model = parallelize(make_net()) if is_spread else DistributedDataParallel(make_net())
    optimizer = make_optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=name == "scaled")
    path = f"memory://{folder}" if name == "address" else folder / name / str(merge)
    for session in range(2 if name == "resumed" else 1):
        with record(model, path, sites=SITES, merge_ranks=merge, resume=session > 0) as recording:
            for number in range(STEPS):
                optimizer.zero_grad()
                x, slope = data_of(number), slope_of(number)
                if not is_spread:
                    x, slope = x.chunk(2)[rank], slope.chunk(2)[rank]
                scaler.scale(loss_of(model(x), slope)).backward()
                scaler.step(optimizer)
                scaler.update()
        torch.distributed.barrier()
    if name != "address":
        return 0
    return int(open_run(path).history["self:output"].count.sum()) if rank == 0 else len(recording.path.name)


def count_collectives(rank: int, folder: Path) -> dict[str, list[int]]:
    """In each step, by the process group's own count: whoever has begun them, in any thread, from Python or not."""
    node.HANDING_SECONDS = 0.02  # the thread is at work in every step
    group = torch.distributed.group.WORLD
    assert group is not None
    found = {}
    for name in ("bare", "apart", "merged"):
        model = DistributedDataParallel(make_net())
        optimizer = make_optimizer(model)
        choices: dict[str, Any] = {"sites": SITES, "merge_ranks": name == "merged"}
        with nullcontext() if name == "bare" else record(model, folder / name, **choices) as recording:
            counts = [group._get_sequence_number_for_group()]
            for number in range(STEPS):
                optimizer.zero_grad()
                loss_of(model(data_of(number)), slope_of(number)).backward()
                optimizer.step()
                time.sleep(0.1)
                counts.append(group._get_sequence_number_for_group())
        if recording is not None:
            recording.flush()
        counts.append(group._get_sequence_number_for_group())
        found[name] = [later - earlier for earlier, later in itertools.pairwise(counts)]
    return found


def test_a_recording_asks_for_no_collective(tmp_path: Path) -> None:
    for found in run_in_two({"counted": count_collectives}, tmp_path)["counted"]:
        assert found["bare"][0] >= 1
        assert found["merged"] == found["apart"] == found["bare"]
    assert list_names(tmp_path / "merged") == ["rank00000"]


def test_each_way_merges_to_what_a_reader_makes_of_it(tmp_path: Path) -> None:
    ways = {"resumed": False, "scaled": False, "parallel": True}
    works: dict[str, Work] = {
        f"{name}-{merge}": partial(train, name=name, merge=merge, is_spread=is_spread)
        for name, is_spread in ways.items()
        for merge in (False, True)
    }
    works["address"] = partial(train, name="address", merge=True)
    found = run_in_two(works, tmp_path)
    for name in ways:
        assert list_names(tmp_path / name / "True") == ["rank00000"]
        one, _ = assert_alike(tmp_path / name / "True", tmp_path / name / "False")
        assert one.manifest["merged"]["lost"] == {}
        assert "2 ranks" in repr(one)
        assert closing._count_processes(one.path, "rank*") == 2
    assert len(open_run(tmp_path / "resumed" / "True").history.loss.steps) == 2 * STEPS
    assert found["address"][0] == STEPS * 8 * 4
