"""Numbers that lie on a device are waited for nowhere in a recorded step: they come a step later, and are the same."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.core.limits import LIMITS
from retrograd.core.recording import deliveries
from retrograd.core.recording.deliveries import Arrays, Deliveries
from retrograd.core.statistics import slab, torch_slab

WAITING = ("item", "cpu", "tolist", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__")
"""Methods of a tensor that would wait for its device."""
OURS = str(Path(rg.__file__).parent)


def refuse(error: str, reason: Exception) -> None:
    raise AssertionError(error) from reason


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take this machine's memory for that of a device that has no kernel of ours."""
    monkeypatch.setattr(slab, "NativeSlab", None)
    monkeypatch.setattr(torch_slab, "read_fast", lambda x, reference: None)
    monkeypatch.setattr(deliveries, "_is_device", lambda device: True)


@contextmanager
def waits_counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count what our code asks of tensors, by its line; what has come may be read."""
    found: Counter[str] = Counter()

    def count() -> None:
        frame: Any = sys._getframe(2)
        while frame is not None and not frame.f_code.co_filename.startswith(OURS):
            frame = frame.f_back
        if frame is not None and not frame.f_code.co_filename.endswith("recording/deliveries.py"):
            found[f"{frame.f_code.co_filename}:{frame.f_lineno}"] += 1

    with monkeypatch.context() as patch:
        for name in WAITING:
            method = getattr(Tensor, name)
            patch.setattr(
                Tensor, name, lambda *args, _method=method, **options: (count(), _method(*args, **options))[1]
            )
        yield found


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4), nn.Softmax(-1))
    return model, torch.optim.Adam(model.parameters(), 1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    for _ in range(2):  # micro-batches
        model(torch.randn(8, 8)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def train(steps: int) -> rg.History:
    model, optimizer = make()
    with rg.record(model) as recording:
        for number in range(steps):
            step(model, optimizer)
            rg.log(twice=2 * number)
            rg.log(size=model[0].weight.detach().norm())  # type: ignore[index, union-attr, operator]
    return recording.history


@pytest.mark.usefixtures("far")
def test_no_recorded_step_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, optimizer = make()
    with rg.record(model, tmp_path / "run"):
        for _ in range(20):
            step(model, optimizer)
        with waits_counted(monkeypatch) as found:
            for _ in range(20, 25):
                step(model, optimizer)
                rg.log(size=model[0].weight.detach().norm())  # type: ignore[index, union-attr, operator]
    assert found == {}


def test_the_same_is_recorded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "facts_seconds", float("inf"))  # else a slow machine notes them in more events
    near = train(21)
    request.getfixturevalue("far")
    there = train(21)
    assert list(there.sites) == list(near.sites)
    for site in near.sites:
        assert np.array_equal(there[site].steps, near[site].steps)
        for name in ("rms", "mean", "max", "zero_share"):
            assert np.allclose(getattr(there[site], name), getattr(near[site], name), rtol=1e-5, atol=1e-8), site
    assert set(there.scalars) == set(near.scalars)
    for name in set(near.scalars) - {"step_time", "throughput", "memory"}:
        assert np.array_equal(there.scalars[name].steps, near.scalars[name].steps), name
        assert np.allclose(there.scalars[name].values, near.scalars[name].values, rtol=1e-4), name
    assert len(there.scalars["update_ratio"].steps) == 21
    one, other = (Counter((e.kind, e.name) for e in each.events if e.name != "memory") for each in (near, there))
    assert one == other


@pytest.mark.usefixtures("far")
def test_order_is_kept_and_nothing_is_lost() -> None:
    came: list[float] = []
    queue = Deliveries(refuse)
    for number in range(5):
        queue.add([torch.tensor(float(number))], lambda arrays: came.append(float(arrays[0])))
    queue.add([], lambda arrays: came.append(5.0))
    assert came == []
    queue.deliver()
    assert came == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert not queue


@pytest.mark.usefixtures("far")
def test_numbers_are_those_of_when_they_were_sent_for() -> None:
    came: list[Any] = []

    def take(arrays: Arrays) -> None:
        came.extend(array.tolist() for array in arrays)

    queue = Deliveries(refuse)
    values, halves = torch.arange(3.0), torch.ones(2, dtype=torch.bfloat16)
    queue.add([values, halves], take)
    queue.add_numbers([7, torch.tensor([3])], came.append)
    values.zero_()
    halves.zero_()
    queue.deliver(wait=True)
    assert came == [[0.0, 1.0, 2.0], [1.0, 1.0], [7.0, 3.0]]


@pytest.mark.usefixtures("far")
def test_what_fails_costs_the_others_nothing() -> None:
    faults: list[str] = []
    came: list[float] = []
    queue = Deliveries(lambda where, error: faults.append(f"{where}: {error}"))

    def fail(arrays: Arrays) -> None:
        raise ValueError("no")

    queue.add([torch.ones(())], fail)
    queue.add([torch.ones(())], lambda arrays: came.append(1.0))
    queue.deliver()
    assert (faults, came) == (["deliveries: no"], [1.0])


def test_what_lies_here_comes_at_once() -> None:
    came: list[float] = []
    queue = Deliveries(refuse)
    queue.add_numbers([1.0, torch.tensor(2.0)], came.extend)
    assert came == [1.0, 2.0]
    assert not queue
