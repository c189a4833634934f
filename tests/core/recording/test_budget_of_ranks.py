"""Ranks that share a budget for overhead record the same steps, so that what is merged is of all of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import retrograd as rg
from tests.processes import run_in_two

pytestmark = pytest.mark.slow

STEPS, WIDTH = 400, 8
SITES = ("*:output", "*:output.grad", "*:weight.update", "0:input.input")


def train(share: float, rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with rg.record(net, folder / "run", sites=SITES, schedule=rg.overhead(share)):
        for step in range(STEPS):
            optimizer.zero_grad()
            batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2 * step + rank))
            spare = batch
            for _ in range(30 * rank):  # this rank's steps take longer
                spare = spare.sin()
            model(batch).square().mean().backward()
            optimizer.step()


def test_each_recorded_step_has_the_rows_of_both(tmp_path: Path) -> None:
    run_in_two({"train": partial(train, 0.05)}, tmp_path)
    run = rg.open_run(tmp_path / "run")
    history = run.history
    output, update = history["0:output"], history["0:weight.update"]
    assert output.count.tolist() == [2 * 4 * WIDTH] * len(output.steps)
    assert output.steps.tolist()[:100] == list(range(100))
    assert len(output.steps) < STEPS
    assert set(update.steps.tolist()) <= set(output.steps.tolist())
    assert history["3:output.grad"].steps.tolist() == output.steps.tolist()
    assert history.loss.steps.tolist() == list(range(STEPS))
    for step in (int(output.steps[-1]), 50):
        batches = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2 * step + rank)) for rank in (0, 1)]
        inputs = history["0:input.input"]
        expected = torch.cat(batches).double().square().mean().sqrt()
        assert float(inputs.rms[inputs.steps.tolist().index(step)]) == pytest.approx(float(expected), rel=1e-3)
