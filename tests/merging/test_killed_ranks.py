"""Ranks that are killed, never record, end early or late: the others go on, and what they record can be read.

Each rank trains by itself, so that nothing but the merging could make one wait for another. The tree is narrow, so that
six ranks have leaves, inner ranks and a root.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from retrograd.merging import node, tree
from retrograd.recording.record import record
from retrograd.runs.reader import Run, open_run
from tests.merging.comparing import list_names
from tests.processes import start

pytestmark = pytest.mark.slow

RANKS = 6
STEPS = 60
ELEMENTS = 4 * 8
"""Of the output that each rank records in a step."""
LIMIT_SECONDS = 240.0

Act = Callable[[int, int], None]
"""What a rank does before a step."""


def die(rank: int, step: int, victim: int) -> None:
    if (rank, step) == (victim, STEPS // 2):
        os.kill(os.getpid(), signal.SIGKILL)


def leave(rank: int, step: int, leaver: int, after: int) -> None:
    if rank == leaver and step == after:
        raise StopIteration


def stay(rank: int, step: int) -> None:
    """Nothing happens."""


def train(rank: int, folder: str, port: int, act: Act, silent: tuple[int, ...], late: tuple[int, ...]) -> None:
    tree.FAN_IN = 2
    if silent:
        node.JOINING_SECONDS = 6.0
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", port, RANKS + 1, is_master=False)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    if rank in late:
        time.sleep(2.0)
    recording = None if rank in silent else record(net, Path(folder) / "run", sites="0:output", merge_ranks=True)
    if not silent and not late:
        torch.distributed.barrier()
    try:
        for step in range(STEPS):
            act(rank, step)
            optimizer.zero_grad()
            net(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            time.sleep(0.06)
    except StopIteration:
        pass
    if recording is not None:
        recording.close()
    os._exit(0)  # without waiting for those that were killed, as destroying the group may


def run_ranks(
    folder: Path, act: Act = stay, silent: tuple[int, ...] = (), late: tuple[int, ...] = ()
) -> tuple[Run, list[int]]:
    """Train; returns what was recorded, and how each process ended."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, RANKS + 1, is_master=True, wait_for_workers=False)
    processes = [
        start(train, rank, str(folder), store.port, act, silent, late, log=folder / f"{rank}.log")
        for rank in range(RANKS)
    ]
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        ended = [process.wait(max(deadline - time.monotonic(), 0.0)) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return open_run(folder / "run"), ended


def count_ranks(run: Run) -> dict[int, int]:
    """How many ranks are in each step."""
    series = run.history["0:output"]
    counts, rest = np.divmod(series.count, ELEMENTS)
    assert not rest.any()
    return dict(zip(series.steps.tolist(), counts.tolist(), strict=True))


@pytest.mark.parametrize("victim", [5, 2, 4])
def test_a_killed_rank_costs_its_last_rows_alone(tmp_path: Path, victim: int) -> None:
    run, ended = run_ranks(tmp_path, partial(die, victim=victim))
    assert [code for rank, code in enumerate(ended) if rank != victim] == [0] * (RANKS - 1)
    counts = count_ranks(run)
    assert list(counts) == list(range(STEPS))
    assert max(counts.values()) <= RANKS
    assert counts[STEPS - 1] == RANKS - 1
    assert list(run.manifest["merged"]["lost"]) == [str(victim)]


def test_without_the_root_its_children_write(tmp_path: Path) -> None:
    run, ended = run_ranks(tmp_path, partial(die, victim=0))
    assert ended[1:] == [0] * (RANKS - 1)
    counts = count_ranks(run)
    assert max(counts.values()) <= RANKS
    assert counts[STEPS - 1] == RANKS - 1
    assert list_names(tmp_path / "run")[1:] == ["rank00001", "rank00002", "rank00004"]


@pytest.mark.parametrize("silent", [(5,), (4,), (2, 3)])
def test_ranks_that_do_not_record_hold_up_nobody(tmp_path: Path, silent: tuple[int, ...]) -> None:
    run, ended = run_ranks(tmp_path, silent=silent)
    assert ended == [0] * RANKS
    assert count_ranks(run) == dict.fromkeys(range(STEPS), RANKS - len(silent))
    assert list_names(tmp_path / "run")[0] == "rank00000"


def test_a_root_that_does_not_record_is_done_without(tmp_path: Path) -> None:
    run, ended = run_ranks(tmp_path, silent=(0,))
    assert ended == [0] * RANKS
    assert count_ranks(run) == dict.fromkeys(range(STEPS), RANKS - 1)
    assert list_names(tmp_path / "run")[0] == "rank00001"


@pytest.mark.parametrize("late", [(5,), (2,), (0,)])
def test_late_ranks_are_waited_for(tmp_path: Path, late: tuple[int, ...]) -> None:
    run, ended = run_ranks(tmp_path, late=late)
    assert ended == [0] * RANKS
    assert count_ranks(run) == dict.fromkeys(range(STEPS), RANKS)
    assert list_names(tmp_path / "run") == ["rank00000"]


@pytest.mark.parametrize("leaver", [0, 2, 5])
def test_a_rank_that_ends_early_has_its_rows_in_the_folder(tmp_path: Path, leaver: int) -> None:
    run, ended = run_ranks(tmp_path, partial(leave, leaver=leaver, after=STEPS // 2))
    assert ended == [0] * RANKS
    here, later = dict.fromkeys(range(STEPS // 2), RANKS), dict.fromkeys(range(STEPS // 2, STEPS), RANKS - 1)
    assert count_ranks(run) == here | later
    assert list_names(tmp_path / "run") == ["rank00000"]
