"""Ranks that are killed, never record, end early or late: the others go on, and what they record can be read.

Each rank trains by itself, so that nothing but the merging could make one wait for another. The tree is narrow, so that
four ranks have a leaf, an inner rank and a root.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from retrograd.core.merging import above, below, node, tree
from retrograd.core.recording.record import record
from retrograd.core.runs.reader import Run, open_run
from tests.core.merging.comparing import list_names
from tests.processes import start

pytestmark = pytest.mark.slow

RANKS = 4
STEPS = 40
ELEMENTS = 4 * 8
"""Of the output that each rank records in a step."""
LIMIT_SECONDS = 100.0

Act = Callable[[int, int], None]
"""What a rank does before a step."""


def die(rank: int, step: int, victims: Collection[int]) -> None:
    if rank in victims and step == STEPS // 2:
        os.kill(os.getpid(), signal.SIGKILL)


def leave(rank: int, step: int, leaver: int) -> None:
    if rank == leaver and step == STEPS // 2:
        raise StopIteration


def stay(rank: int, step: int) -> None:
    """Nothing happens."""


def train(rank: int, folder: Path, port: int, act: Act, silent: tuple[int, ...], late: tuple[int, ...]) -> None:
    tree.FAN_IN = 2
    node.HANDING_SECONDS = 0.2
    above.LOOKING_SECONDS = below.LOOKING_SECONDS = node.LOOKING_SECONDS = 2.0
    if silent:
        above.JOINING_SECONDS = below.JOINING_SECONDS = 3.0
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", port, RANKS + 1, is_master=False)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    if rank in late:
        time.sleep(1.0)
    sites = ("0:output", "0:weight")
    recording = None if rank in silent else record(net, folder / "run", sites=sites, merge_ranks=True)
    if not silent and not late:
        torch.distributed.barrier()
    try:
        for step in range(STEPS):
            act(rank, step)
            optimizer.zero_grad()
            net(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            time.sleep(0.05)
    except StopIteration:
        pass
    if recording is not None:
        recording.close()
    os._exit(0)  # without waiting for those that were killed, as destroying the group may


def run_ranks(
    folder: Path, act: Act = stay, silent: tuple[int, ...] = (), late: tuple[int, ...] = ()
) -> tuple[Run, list[int | None]]:
    """Train; returns what was recorded, and how each process ended."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, RANKS + 1, is_master=True, wait_for_workers=False)
    spawned = start(train, (folder, store.port, act, silent, late), RANKS)
    deadline = time.monotonic() + LIMIT_SECONDS
    for process in spawned.processes:
        process.join(max(deadline - time.monotonic(), 0.0))
        if process.is_alive():
            for each in spawned.processes:
                each.kill()
            raise TimeoutError("a rank hangs")
    return open_run(folder / "run"), [process.exitcode for process in spawned.processes]


def count_ranks(run: Run) -> dict[int, int]:
    """How many ranks are in each step."""
    series = run.history["0:output"]
    counts, rest = np.divmod(series.count, ELEMENTS)
    assert not rest.any()
    return dict(zip(series.steps.tolist(), counts.tolist(), strict=True))


@pytest.mark.parametrize("victims", [pytest.param((3,), marks=pytest.mark.thorough), (2,), (0,), (0, 2)])
def test_killed_ranks_cost_their_own_last_rows_alone(tmp_path: Path, victims: tuple[int, ...]) -> None:
    run, ended = run_ranks(tmp_path, partial(die, victims=victims))
    assert [code for rank, code in enumerate(ended) if rank not in victims] == [0] * (RANKS - len(victims))
    counts = count_ranks(run)
    assert list(counts) == list(range(STEPS))
    alive = RANKS - len(victims)
    assert all(alive <= counts[step] <= RANKS for step in range(STEPS // 2))
    assert all(counts[step] == alive for step in range(STEPS // 2, STEPS))
    assert list_names(tmp_path / "run") == ["rank00000", "rank00001"][: 2 if 0 in victims else 1]
    if 0 not in victims:
        assert list(run.manifest["merged"]["lost"]) == [str(victim) for victim in victims]


@pytest.mark.parametrize("silent", [(0,), (2, 3)])
def test_ranks_that_do_not_record_hold_up_nobody(tmp_path: Path, silent: tuple[int, ...]) -> None:
    run, ended = run_ranks(tmp_path, silent=silent)
    assert ended == [0] * RANKS
    assert count_ranks(run) == dict.fromkeys(range(STEPS), RANKS - len(silent))
    assert list_names(tmp_path / "run")[0] == f"rank0000{int(0 in silent)}"


@pytest.mark.parametrize("late", [pytest.param((2,), marks=pytest.mark.thorough), (0,)])
def test_late_ranks_are_waited_for(tmp_path: Path, late: tuple[int, ...]) -> None:
    run, ended = run_ranks(tmp_path, late=late)
    assert ended == [0] * RANKS
    assert count_ranks(run) == dict.fromkeys(range(STEPS), RANKS)
    assert list_names(tmp_path / "run") == ["rank00000"]


@pytest.mark.parametrize("leaver", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_rank_that_ends_early_has_its_rows_in_the_folder(tmp_path: Path, leaver: int) -> None:
    run, ended = run_ranks(tmp_path, partial(leave, leaver=leaver))
    assert ended == [0] * RANKS
    here, later = dict.fromkeys(range(STEPS // 2), RANKS), dict.fromkeys(range(STEPS // 2, STEPS), RANKS - 1)
    assert count_ranks(run) == here | later
    assert list_names(tmp_path / "run") == ["rank00000"]
