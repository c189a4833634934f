"""Plain tensors are recorded past Python, and all others in Python: nobody can tell from what was recorded."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import retrograd as rg
from retrograd.core.hooks import gradients, module
from retrograd.core.hooks.native import taps
from retrograd.core.recording.keep import TensorKeeper
from retrograd.core.recording.module_watch import OutputWatch
from retrograd.core.recording.record import Recording
from retrograd.core.recording.recorder import Recorder
from retrograd.core.recording.settings import Settings
from tests.core.recording.collector import Collector, collect


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"both": (x.sin(), x.detach().argmax()), "none": None}


class Odd(nn.Module):
    """Returns what is plain and what is not: nests, leaves, parameters, integers, views that are written into."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.relu, self.pair, self.same = nn.ReLU(inplace=True), Pair(), nn.Identity()
        self.calls = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.relu(self.first(self.same(x)))
        for _ in range(self.calls):
            h = self.cell(h).tanh()
        self.calls = 4 - self.calls
        h = h * self.same(self.first.weight).sum() + self.pair(h)["both"][0]
        if h.requires_grad:
            for again in (True, False):
                h = checkpoint(self.cell, h, use_reentrant=again)
        self.same(torch.arange(3))
        with torch.device("cpu"):  # a function mode
            return self.last(self.same(h)[:, ::2].repeat(1, 2))


def run(keeps: Any, **options: Any) -> Collector:
    torch.manual_seed(0)
    net = Odd()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen, settings = Collector(), Settings(sites="*:output*", tensors=keeps, **options)
    with Recording(Recorder(net, seen, settings, sources=()), seen, None):  # those of facts have function modes
        for step in range(4):
            x = torch.randn(5, 4, requires_grad=step == 2)
            for quiet in (torch.no_grad, torch.inference_mode):
                with quiet():
                    net(x)
            if step == 3:
                with pytest.raises(RuntimeError):
                    net(x[:, :3])
            net(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen


def tell(seen: Collector) -> list[Any]:
    """All of it as plain values."""
    rows = [
        (str(row), row.scale, [float(row.columns[key]) for key in row.columns], row.bins.tolist()) for row in seen.rows
    ]
    tensors = [(item.moment, item.site, item.version, item.tensor.tolist()) for item in seen.tensors]
    return [rows, tensors, [(event.kind, event.name, event.text) for event in seen.events]]


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Filled with the calls of modules that reach Python."""
    reached: list[str] = []
    original = OutputWatch.after_forward

    def after_forward(self: OutputWatch, *args: Any) -> None:
        reached.append(self.path)
        original(self, *args)

    monkeypatch.setattr(OutputWatch, "after_forward", after_forward)
    return reached


@pytest.mark.skipif(taps is None, reason="there is no compiled code")
@pytest.mark.parametrize(
    ("keeps", "options"),
    [
        (None, {}),
        ("*:output*", {}),
        ("*:output*", {"statistics": False, "tensor_budget": 2000}),
        (rg.Keep("cell:output*", last=1), {"tensor_budget": 700}),
        (rg.Keep("*:output*", copy=True), {"histogram": False}),
        ("*:output*", {"tensor_budget": 10**30}),
    ],
    ids=["statistics", "and references", "references alone, which do not fit", "the last ones", "copies", "no end"],
)
def test_compiled_code_records_what_python_does(
    keeps: Any, options: dict[str, Any], frames: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_short = options.get("tensor_budget", 10**6) < 10**6
    with pytest.warns(UserWarning, match="budget") if is_short else nullcontext():
        by_code = tell(run(keeps, **options))
    n_frames = len(frames)
    monkeypatch.setattr(gradients, "taps", None)
    monkeypatch.setattr(module, "taps", None)
    by_python = tell(run(keeps, **options))
    assert by_code == by_python
    assert len(by_code[0]) > 100 or len(by_code[1]) > 50
    assert n_frames < 0.6 * (len(frames) - n_frames)


def test_what_fails_past_python_is_not_done_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(keeper: TensorKeeper, keep: rg.Keep, tensor: torch.Tensor) -> int | None:
        raise ValueError

    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with collect(net, sites="*:output*", tensors="*:output*", tensor_budget=600) as seen:
        net(torch.randn(5, 4)).sum().backward()
        monkeypatch.setattr(TensorKeeper, "admit", fail)  # asked past Python only where there is no room
        net(torch.randn(10, 4)).sum().backward()
    assert seen.events_of("fault")
    assert {row.calls for row in seen.rows} == {1}
