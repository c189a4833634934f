import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import numpy as np
import pytest
import torch

from retrograd.core.runs.reader import open_run
from retrograd.core.runs.writer import RunWriter
from tests import warm
from tests.core.history.made import make_steps

GENEROUS = 2.0
"""Seconds in which a busy machine surely writes what was handed over."""


class Running:
    """A process that writes until the block ends, then is killed.

    Attributes:
        handed_over: the last step that it had handed over when it died.
    """

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-m", "tests.core.runs.killed", str(path)]
        self._process = warm.Popen(command, stdout=subprocess.PIPE, text=True)
        self.handed_over = self.read_step()

    def read_step(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        rest, _ = self._process.communicate(timeout=30)
        self.handed_over = max([self.handed_over, *(int(line) for line in rest.splitlines() if line)])


def list_steps(path: Path) -> np.ndarray:
    history = open_run(path).history
    return history["a:output"].steps if history.sites else np.empty(0, np.int64)


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    chance = random.Random(0)
    for trial in range(3):
        written = -1
        with Running(tmp_path) as process:
            time.sleep(chance.uniform(0, 0.5))
            if trial == 2:
                written = process.handed_over
                time.sleep(GENEROUS)
        run = open_run(tmp_path)
        assert run.status == "stopped"
        steps = list_steps(tmp_path)
        losses = run.history.loss.steps
        assert losses.tolist() == list(range(len(losses)))  # all up to some step, each once
        assert (np.diff(steps) > 0).all()  # of a flush that was cut off there may be losses without rows
        assert steps.max(initial=-1) <= losses.max(initial=-1)
        assert written <= losses.max(initial=-1) <= process.handed_over + 1
        assert run.history.matrix("count").values.sum() == 8 * 5 * len(steps)
        for kept in run.history["a:output"].tensors if len(steps) else ():
            assert torch.equal(kept.tensor, torch.full((2,), float(kept.step)))
        assert len({event.moment.step for event in run.history.events}) == len(run.history.events)
    writer = RunWriter(tmp_path, resume=True, step=int(steps[-2]))
    writer.add_sites(["a:output", "a:output.grad"])
    writer.add_rows(make_steps([writer.next_step], n_sites=2)[0])
    writer.close()
    run = open_run(tmp_path)
    assert run.status == "finished"
    assert run.history["a:output"].steps.tolist() == steps[:-1].tolist()


def test_all_that_is_older_than_a_flush_is_there(tmp_path: Path) -> None:
    with Running(tmp_path) as process:
        step = process.read_step()
        deadline = time.monotonic() + 30
        while step not in list_steps(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert step in list_steps(tmp_path)
