"""Ctrl-C, to all that torchrun has started or to one rank alone: all that was recorded is in the run, once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd.core.runs.reader import open_run
from tests import warm

pytestmark = pytest.mark.slow

RANKS = 2
TRAINS_ON = """
import os, time, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(10_000):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
    if step == 20:
        os.write(1, f"{dist.get_rank()} {os.getpid()}\\n".encode())  # at once: the other rank writes there too
"""
ELEMENTS = 2 * 8
"""Of an output of one rank in a step."""


def start(folder: Path) -> subprocess.Popen[str]:
    (folder / "trains_on.py").write_text(TRAINS_ON)
    ours = [sys.executable, "-m", "retrograd", "run", "--merge-ranks", "-o", "run"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return warm.Popen([*ours, *torchrun, "trains_on.py"], cwd=folder, start_new_session=True, **pipes)


@pytest.mark.parametrize("to", ["all", "one"])
def test_an_interrupt_costs_nothing_that_was_written(tmp_path: Path, to: str) -> None:
    with start(tmp_path) as program, contextlib.ExitStack() as at_end:
        at_end.callback(os.killpg, program.pid, signal.SIGKILL)
        assert program.stdout is not None
        said = [program.stdout.readline().split() for _ in range(RANKS)]
        pids = {int(rank): int(pid) for rank, pid in said}
        while not list((tmp_path / "run").glob("rank00000/statistics/[!.]*.parquet")):
            time.sleep(0.05)
        before = open_run(tmp_path / "run").history["0:output"]
        if to == "all":
            os.killpg(program.pid, signal.SIGINT)  # as a terminal does it
        else:
            os.kill(pids[1], signal.SIGINT)
        errors = program.communicate(timeout=100)[1]
        at_end.pop_all()
    assert program.returncode, errors
    assert "were not merged" not in errors
    run = open_run(tmp_path / "run")
    series = run.history["0:output"]
    assert series.steps.tolist() == list(range(len(series.steps)))
    assert len(series.steps) >= len(before.steps) > 0
    assert (series.count[: len(before.steps)] == RANKS * ELEMENTS).all()
    assert np.isin(series.count, [ELEMENTS, RANKS * ELEMENTS]).all()
    assert run.history["0:weight"].count.tolist() == [8 * 4] * len(run.history["0:weight"].steps)
    assert run.manifest["merged"]["ranks"] == list(range(RANKS))
    assert run.status == "failed"
