"""Whatever of torch's compiler is missing, compiled code is recorded: more slowly, and never with an error."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.compiled import aot, inductor
from retrograd.core.errors import RetrogradWarning
from retrograd.core.hooks import compiled
from retrograd.core.hooks.private_names import OPTIONAL
from tests import warm
from tests.compiled.lacking import Lacking

pytestmark = pytest.mark.usefixtures("fresh_compiler")

NAMES = [
    pytest.param(group, name, marks=[pytest.mark.thorough] if place else [])
    for group, each in OPTIONAL.items()
    for place, name in enumerate(each.names)
]


class Net(nn.Module):
    """Returns two tensors, one of which it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).tanh())
        return out


def run(backend: str | None) -> dict[str, float]:
    """The root mean square of all that is recorded in a step."""
    torch.manual_seed(0)
    net: Any = Net()
    call = net if backend is None else torch.compile(net, backend=backend)
    with rg.record(net) as recording:
        call(torch.arange(6.0).reshape(2, 3)).sum().backward()
    return {str(site): recording.history[site].rms[-1] for site in recording.history.sites}


@cache
def run_eagerly() -> dict[str, float]:
    return run(None)


@pytest.fixture
def lacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Takes a name away from where torch is asked for it; torch itself keeps it."""
    caches = aot._has_names, inductor._has_names

    def hide(name: str) -> None:
        room, _, path = name.partition(":")
        find = compiled._find_room
        monkeypatch.setattr(
            compiled, "_find_room", lambda asked: Lacking(find(asked), path) if asked == room else find(asked)
        )
        for each in caches:
            each.cache_clear()  # type: ignore[attr-defined]

    yield hide
    for each in caches:
        each.cache_clear()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("group", "name"), NAMES)
def test_without_a_name_all_is_recorded_and_that_is_said(group: str, name: str, lacks: Any) -> None:
    expected = run_eagerly()
    importlib.import_module("torch._inductor.lowering")
    lacks(name)
    room = name.partition(":")[0]
    if group == "graph outputs":  # only rules ask for them
        with pytest.warns(RetrogradWarning, match=f"another {room} than retrograd knows"):
            _rewrite()
        return
    with pytest.warns(RetrogradWarning, match=f"another {room} than retrograd knows"):
        found = run("aot_eager")
        inductor.teach_inductor()
    assert found == pytest.approx(expected)


def _rewrite() -> None:
    net = Net()
    with rg.rewrite(net, {"second:output.grad": rg.rules.Scale(2.0)}):
        torch.compile(net, backend="aot_eager")(torch.ones(2, 3)).sum().backward()
    doubled = net.second[0].weight.grad
    net.zero_grad()
    net(torch.ones(2, 3)).sum().backward()
    torch.testing.assert_close(doubled, 2 * net.second[0].weight.grad)


def test_without_a_name_inductor_is_taught_nothing(monkeypatch: pytest.MonkeyPatch, lacks: Any) -> None:
    lowering: Any = importlib.import_module("torch._inductor.lowering")
    scheduler = importlib.import_module("torch._inductor.scheduler").Scheduler
    monkeypatch.setattr(lowering, "lowerings", {})
    order = scheduler.compute_last_usage
    lacks("torch._inductor.scheduler:Scheduler.compute_last_usage")
    with pytest.warns(RetrogradWarning, match="another torch._inductor.scheduler"):
        inductor.teach_inductor()
    inductor.teach_inductor()
    assert not lowering.lowerings
    assert scheduler.compute_last_usage is order


PROGRAM = """
import json, sys
from dataclasses import replace
from retrograd.core.hooks.private_names import OPTIONAL
for group in sys.argv[2:]:
    OPTIONAL[group] = replace(OPTIONAL[group], names=("torch:a_name_of_another_version",))
import torch
from torch import nn
import retrograd as rg

def run(backend):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    call = torch.compile(net, backend=backend) if backend else net
    with rg.record(net) as recording:
        for _ in range(2):
            call(torch.arange(6.0).reshape(2, 3)).sum().backward()
    assert ("retrograd.compiled.taps" in sys.modules) == bool(backend)
    return {str(site): recording.history[site].rms.tolist() for site in recording.history.sites}

print(json.dumps([run(None), run(sys.argv[1])]))
"""


@pytest.mark.slow
@pytest.mark.skipif(which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize(
    "lacking", [[*OPTIONAL], *(pytest.param([each], marks=pytest.mark.thorough) for each in OPTIONAL)]
)
def test_with_a_torch_of_other_names_all_is_recorded(lacking: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    words = [sys.executable, str(script), "inductor", *lacking]
    done = warm.run(words, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    eager, found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == eager.keys()
    for site, rms in eager.items():
        np.testing.assert_allclose(found[site], rms, rtol=1e-5, err_msg=site)
