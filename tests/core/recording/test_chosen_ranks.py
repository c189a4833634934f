"""Programs of several processes of which some record: the others train as they do without us, and nothing hangs.

Numbers are exact in any order of adding, so what is recorded is compared to the bit with what one process sees.
"""

from __future__ import annotations

import itertools
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from retrograd.core.errors import RecordingError
from retrograd.core.history.windows import LongRows, compare_copies
from retrograd.core.hooks.backward import backward_listeners
from retrograd.core.hooks.optimizer import optimizer_listeners
from retrograd.core.recording.record import record, watch
from retrograd.core.runs.compaction import compact
from retrograd.core.runs.layout import list_rank_folders
from retrograd.core.runs.reader import open_run
from retrograd.core.views.report.facts import describe_recorded
from retrograd.core.views.report.scope import choose_scope
from retrograd.explaining.findings.explain import explain
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
from tests.core.runs.engines import assert_sql_gives_the_history
from tests.processes import Work, run_together

pytestmark = pytest.mark.slow

RANKS = 4
SITES = ("*:output", "*:output.grad", "*:weight*", "*:bias*")
PARAMETERS = ["0:weight", "0:weight.grad", "2:weight.update", "2:bias.grad"]
CHOICES = {"bare": None, "all": "all", "first": 0, "inner": "1,2", "every other": "1/2", "none": [RANKS]}


def shard(net: nn.Module, *sizes: int) -> nn.Module:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[: len(sizes)])
    for layer in net:  # type: ignore[union-attr]
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


WAYS: dict[str, Any] = {
    "ddp": DistributedDataParallel,
    "fsdp2": lambda net: shard(net, RANKS),
    "hsdp": lambda net: shard(net, 2, 2),
}


def share_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    return data_of(step).chunk(RANKS)[rank], slope_of(step).chunk(RANKS)[rank]


def count_hooks(net: nn.Module) -> int:
    """Hooks on modules and parameters, and listeners to what torch does."""
    on_modules = sum(
        len(getattr(each, name))
        for each in net.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    )
    on_parameters = sum(len(each._backward_hooks or ()) for each in net.parameters())
    return on_modules + on_parameters + len([*backward_listeners, *optimizer_listeners])


def count_collectives() -> int:
    return sum(group._get_sequence_number_for_group() for group in torch.distributed.distributed_c10d._world.pg_map)


def train(rank: int, folder: Path, way: str, name: str) -> dict[str, Any]:
    """Collectives of each step are those that the process group counts, whoever has begun them."""
    model = WAYS[way](make_net())
    optimizer = make_optimizer(model)
    before, counts, ranks = count_hooks(model), [count_collectives()], CHOICES[name]
    with (
        nullcontext()
        if ranks is None
        else record(model, folder / "runs" / f"{way} {name}", sites=SITES, ranks=ranks) as recording
    ):
        hooks = count_hooks(model) - before
        for step in range(STEPS):
            optimizer.zero_grad()
            x, slope = share_of(step, rank)
            loss_of(watch("out", model(x)), slope).backward()
            optimizer.step()
            counts.append(count_collectives())
        if recording is not None:
            recording.flush()
            counts.append(count_collectives())
    weights = [getattr(each, "full_tensor", lambda each=each: each)().detach().clone() for each in model.parameters()]
    pairs = itertools.pairwise(counts[: STEPS + 1])
    return {"hooks": hooks, "counts": [b - a for a, b in pairs], "end": counts[STEPS:], "weights": weights}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, list[dict[str, Any]]]:
    works: dict[str, Work] = {
        f"{way} {name}": partial(train, way=way, name=name)
        for way in WAYS
        for name in (CHOICES if way == "ddp" else ("bare", "all", "first"))
    }
    (folder / "runs").mkdir()
    return run_together(works, folder, RANKS)


def test_no_rank_takes_part_in_a_collective_of_ours_and_training_is_as_it_is(
    found: dict[str, list[dict[str, Any]]],
) -> None:
    for name, ranks in found.items():
        bare = found[f"{name.split()[0]} bare"]
        assert bare[0]["counts"][0] >= 1
        for rank in range(RANKS):
            assert ranks[rank]["counts"] == bare[rank]["counts"], name
            assert len(set(ranks[rank]["end"])) == 1, name
            assert all(map(torch.equal, ranks[rank]["weights"], bare[rank]["weights"])), name


def test_a_rank_that_was_not_chosen_has_no_hooks_and_no_folder(
    found: dict[str, list[dict[str, Any]]], folder: Path
) -> None:
    chosen = {"bare": [], "all": range(RANKS), "first": [0], "inner": [1, 2], "every other": [0, 2], "none": []}
    for name, ranks in chosen.items():
        assert [rank for rank in range(RANKS) if found[f"ddp {name}"][rank]["hooks"]] == list(ranks), name
        run = folder / "runs" / f"ddp {name}"
        assert [path.name for path in list_rank_folders(run)] == [f"rank{rank:05d}" for rank in ranks], name
        assert (run / "manifest.json").exists() == bool(ranks), name


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize(
    ("name", "ranks", "told"),
    [
        ("first", [0], "only rank 0 of 4 recorded"),
        ("inner", [1, 2], "only ranks 1 and 2 of 4 recorded"),
        ("every other", [0, 2], "only one rank in 2 of 4 recorded"),
        ("all", [0, 1, 2, 3], ""),
    ],
)
def test_what_all_ranks_hold_alike_is_that_of_one_and_the_rest_is_its_part(
    folder: Path, name: str, ranks: list[int], told: str
) -> None:
    run = open_run(folder / "runs" / f"ddp {name}")
    truth = train_whole()
    assert_merged(run.history, truth, sites=PARAMETERS)
    outputs = run.history["self:output"]
    for step in range(STEPS):
        parts = [truth.seen["self:output"][step][0].chunk(RANKS)[rank] for rank in ranks]
        assert outputs.count[step] == sum(part.numel() for part in parts)
        assert outputs.max[step] == max(part.max().item() for part in parts)
    assert run.status == "finished"
    assert told in repr(run)
    assert ("recorded)" in repr(run)) == bool(told)
    assert dict(describe_recorded(choose_scope(run.history, None, 100, 10), [])).get("ranks", "") == told
    findings = explain(run)
    assert told in findings.headline
    assert ("recorded" in findings.headline) == bool(told)
    reasons = {each.detector: each.reason for each in findings.not_checked}
    assert reasons.get("ranks-disagree", "").startswith(told) or not told


@pytest.mark.usefixtures("found")
def test_of_sharded_parameters_a_rank_sees_its_part_and_all_together_are_whole(folder: Path) -> None:
    whole = make_net()[0].weight.numel()
    for way, part in (("fsdp2", whole // RANKS), ("hsdp", whole // 2)):
        assert open_run(folder / "runs" / f"{way} first").history["0:weight.grad"].count.tolist() == [part] * STEPS
        assert_merged(open_run(folder / "runs" / f"{way} all").history, train_whole(), sites=PARAMETERS)


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("way", WAYS)
def test_an_engine_merges_ranks_to_what_a_reader_makes_of_them(folder: Path, way: str, tmp_path: Path) -> None:
    """By the SQL of docs/scale.md."""
    assert_sql_gives_the_history(folder / "runs" / f"{way} all", tmp_path)
    compact(shutil.copytree(folder / "runs" / f"{way} all", tmp_path / "compacted"))
    assert_merged(open_run(tmp_path / "compacted").history, train_whole(), sites=[*PARAMETERS, "self:output"])


def test_the_recording_of_such_a_rank_does_nothing(tmp_path: Path) -> None:
    with record(make_net(), tmp_path / "run", ranks=1) as recording:
        assert recording.is_open
        recording.begin_step(3)
        recording.watch("x", torch.ones(1))
        assert (recording.step, recording.run, len(recording.history.sites)) == (0, None, 0)
    assert not recording.is_open
    assert not (tmp_path / "run").exists()
    assert repr(recording) == "<Recording of nothing: rank 0 does not record>"
    with pytest.raises(RecordingError, match="a rank that did not record"):
        record(make_net(), tmp_path / "run", resume=recording.state_dict())


# ---- ranks that make different numbers of micro-batches ----


PASSES = (1, 2, 2, 1)


def accumulate(rank: int, folder: Path) -> None:
    """Each rank cuts its rows into as many micro-batches as it likes; all reduce in the last one."""
    model = DistributedDataParallel(make_net())
    optimizer = make_optimizer(model)
    with record(model, folder / "uneven", sites=SITES):
        for step in range(STEPS):
            optimizer.zero_grad()
            x, slope = share_of(step, rank)
            for left in reversed(range(PASSES[rank])):
                part, its = (each.chunk(PASSES[rank])[left] for each in (x, slope))
                with model.no_sync() if left else nullcontext():
                    (loss_of(model(part), its) / PASSES[rank]).backward()
            optimizer.step()


def reduce_and_leave(rank: int, folder: Path) -> None:
    """Some ranks have a pass more; two passes of each step are reduced. The last step has one, and no update."""
    model = DistributedDataParallel(make_net())
    optimizer = make_optimizer(model)
    with record(model, folder / "twice", sites=SITES):
        for step in range(STEPS):
            optimizer.zero_grad()
            x, slope = share_of(step, rank)
            for left in reversed(range(PASSES[rank] + 1)):
                with model.no_sync() if left > 1 else nullcontext():
                    loss_of(model(x), slope).backward()
            optimizer.step()
        optimizer.zero_grad()
        loss_of(model(data_of(0)), slope_of(0)).backward()


def test_ranks_with_different_numbers_of_micro_batches_are_one_process(tmp_path: Path) -> None:
    run_together({"uneven": accumulate, "twice": reduce_and_leave}, tmp_path, RANKS)
    twice = open_run(tmp_path / "twice").history
    n = make_net()[0].weight.numel()
    assert twice["0:weight.grad"].count.tolist() == [2 * n] * STEPS + [n]
    assert not twice.disagreements
    for _ in range(2):  # as it was recorded, and compacted
        history = open_run(tmp_path / "uneven").history
        assert_merged(history, train_whole(), factor=lambda site: RANKS if site.endswith(":output.grad") else 1.0)
        assert not history.disagreements
        assert not compare_copies(LongRows(history.rows.parts, None, {}, history.rows.copies))
        np.testing.assert_array_equal(history["self:output"].exponents[1].sum(axis=1), [32 - z for z in _zeros()])
        compact(tmp_path / "uneven")


def _zeros() -> list[int]:
    return [int((each[0] == 0).sum()) for each in train_whole().seen["self:output"].values()]
