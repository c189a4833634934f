"""The journeys of docs/journeys.md name files that run; that of a step is in ``tests/core/recording/test_tour.py``."""

from __future__ import annotations

import re
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.core.cli import main

SOURCE = Path(rg.__file__).parent
JOURNEYS = Path(__file__).parents[1] / "docs" / "journeys.md"


def read_journey(title: str, end: str = "\n## ") -> set[str]:
    """The files that a journey names, but for those that hold data alone."""
    _, _, text = JOURNEYS.read_text().partition(f"\n## {title}")
    named = set(re.findall(r"`([a-z_/]+\.py)`", text.partition(end)[0]))
    assert len(named) > 8
    return {path for path in named if re.search(r"^ *def ", (SOURCE / path).read_text(), re.MULTILINE)}


def files_of(run: Callable[[], object]) -> set[str]:
    """The files of ours of which a function runs when all is loaded, in any thread that is begun meanwhile."""
    run()
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            found.add(path.relative_to(SOURCE).as_posix())

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def make_net(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(), nn.Linear(width, 1))


def train(net: nn.Module, steps: int = 4, samples: int = 16) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(samples, 4)).square().mean().backward()
        optimizer.step()


def test_of_a_rule() -> None:
    def damp(gradient: Tensor, state: Any) -> Tensor:
        state.ema("norm", 0.9).add(gradient.norm())
        return gradient / 2

    def run() -> None:
        net = make_net()
        rules: dict[str, Any] = {
            "0:output.grad": [damp, rg.rules.ClipValue(1.0)],
            "3:input.*": [rg.rules.ClipValue(1.0)],
        }
        with rg.rewrite(net, rules):
            train(net)

    assert read_journey("A rule", end="\n4. *Elsewhere.*") <= files_of(run)


def test_of_a_saved_tensor() -> None:
    def run() -> None:
        net = make_net(64)
        with rg.keep_saved(net, budget="70%"):
            train(net, samples=4_000)

    assert read_journey("A saved tensor") - {"memory/policies/cuda_copies.py"} <= files_of(run)


def test_of_a_fact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        net, folder = make_net().eval(), tempfile.mkdtemp(dir=tmp_path)
        with rg.record(net, folder):
            train(net)
        assert main(["explain", folder]) == 0
        rg.write_report(folder)

    assert read_journey("A fact") <= files_of(run)
    assert "eval mode" in capsys.readouterr().out
