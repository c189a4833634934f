"""Sources that look at recorded steps alone are told of these, and of the first step behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from retrograd.core.history.history import History
from retrograd.core.recording.fact_source import FactHost, FactSource
from retrograd.core.recording.recorder import Recorder
from retrograd.core.recording.settings import Settings

CALLS = ["forward_begins", "forward_ends", "backward_begins", "backward_ends", "update_begins", "update_ends"]


class Told(FactSource):
    """Notes what it is told of, each with the number of the training step that makes it."""

    def __init__(self, host: FactHost, steps: Sequence[int], told: list[tuple[int, str]]) -> None:
        super().__init__(host)
        for name in CALLS:
            setattr(type(self), name, lambda self, *about, name=name: told.append((steps[-1], name)))


class Resting(Told):
    rests = True


def test_a_source_that_rests_is_told_of_recorded_steps_and_of_the_next_one() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps: list[int] = []
    by_awake, by_resting = list[Any](), list[Any]()
    sources = (lambda host: Told(host, steps, by_awake), lambda host: Resting(host, steps, by_resting))
    recorder = Recorder(model, History(), Settings(schedule=lambda step: step in (1, 4, 5)), sources=sources)
    recorder.attach()
    for step in range(9):
        steps.append(step)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    recorder.close()
    assert by_awake == [(step, name) for step in range(9) for name in CALLS]
    assert by_resting == [(step, name) for step in (1, 2, 4, 5, 6) for name in CALLS]
