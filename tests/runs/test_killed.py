import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from retrograd.runs.reader import open_run
from retrograd.runs.writer import RunWriter
from tests.history.made import make_steps

GENEROUS = 2.0
"""Seconds in which a busy machine surely writes what was handed over."""


def start(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-m", "tests.runs.killed", str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def kill(process: subprocess.Popen[str]) -> int:
    """Kill a process; returns the last step that it had handed over."""
    process.kill()
    rest, _ = process.communicate(timeout=30)
    return int(rest.splitlines()[-1]) if rest.splitlines() else 0


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    chance = random.Random(0)
    for trial in range(4):
        process = start(tmp_path)
        written = -1
        time.sleep(chance.uniform(0, 0.5))
        if trial == 3:  # let it write for a while, and see that it does
            known = open_run(tmp_path).history["a:output"].steps.max(initial=-1)
            time.sleep(GENEROUS)
            written = known
        handed_over = kill(process)
        run = open_run(tmp_path)
        assert run.status == "stopped"
        steps = run.history["a:output"].steps
        assert steps.tolist() == list(range(len(steps)))  # all up to some step, each once
        assert written < len(steps) <= max(handed_over, 0) + 2
        assert run.history.matrix("count").values.sum() == 8 * 5 * len(steps)
        for kept in run.history["a:output"].tensors:
            assert torch.equal(kept.tensor, torch.full((2,), float(kept.step)))
        assert len({event.moment.step for event in run.history.events}) == len(run.history.events)
    writer = RunWriter(tmp_path, resume=True, step=len(steps) - 2)
    writer.add_sites(["a:output", "a:output.grad"])
    writer.add_rows(make_steps([writer.next_step], n_sites=2)[0])
    writer.close()
    run = open_run(tmp_path)
    assert run.status == "finished"
    assert run.history["a:output"].steps.tolist() == list(range(len(steps) - 1))


def test_all_that_is_older_than_a_flush_is_there(tmp_path: Path) -> None:
    process = start(tmp_path)
    assert process.stdout is not None
    step = int(process.stdout.readline())
    deadline = time.monotonic() + 30
    while step not in open_run(tmp_path).history["a:output"].steps and time.monotonic() < deadline:
        time.sleep(0.01)
    kill(process)
    assert step in open_run(tmp_path).history["a:output"].steps
