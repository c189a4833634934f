"""The journey of one recorded step, in docs/journeys.md, names the files that run in one."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import retrograd
from retrograd.core.limits import LIMITS
from tests.core.recording.collector import collect

SOURCE = Path(retrograd.__file__).parent
JOURNEYS = Path(__file__).parents[3] / "docs" / "journeys.md"
ROOMS = ("core/recording/", "core/progress/")


def read_journey() -> set[str]:
    text = JOURNEYS.read_text().split("## A step, from backward to a curve")[1].split("5. *Curve.*")[0]
    return {path for path in re.findall(r"`([a-z_/]+\.py)`", text) if path.startswith(ROOMS)}


def files_of_a_step() -> set[str]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            found.add(path.relative_to(SOURCE).as_posix())

    def train() -> None:
        optimizer.zero_grad()
        net(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()

    with collect(net):
        for _ in range(3):
            train()
        sys.setprofile(note)
        try:
            train()
        finally:
            sys.setprofile(None)
    return {name for name in found if name.startswith(ROOMS)}


def test_the_journey_names_the_files_that_run_in_a_recorded_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "memory_seconds", 0.0)  # memory is measured once in a while
    assert files_of_a_step() == read_journey()
