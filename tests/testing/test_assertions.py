"""``rg.testing.assert_healthy`` and ``assert_same``."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.errors import CallError, CompareError, NothingRecordedError


def train(path: Path | None = None, *, lr: float = 0.1, steps: int = 8, seed: int = 0) -> rg.Recording:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with rg.record(model, path) as recording:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(32, 4)).square().mean().backward()
            optimizer.step()
    return recording


def norms(lr: float, steps: int) -> list[float]:
    """Norms of the gradients of the same training, by torch alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(32, 4)).square().mean().backward()
        found.append(
            float(nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None]))
        )
        optimizer.step()
    return found


def test_a_healthy_run_in_every_form(tmp_path: Path) -> None:
    recording = train(tmp_path / "run")
    for run in (recording, recording.run, recording.history, tmp_path / "run", str(tmp_path / "run"), train()):
        assert run is not None
        rg.testing.assert_healthy(run)
        rg.testing.assert_healthy(run, no=("nan-forward", "missing-gradient"), max_grad_norm=1e6)


def test_a_finding_is_in_the_message() -> None:
    run = train(lr=1e30)
    found = [each for each in rg.explain(run) if each.severity != "note"]
    with pytest.raises(AssertionError) as raised:
        rg.testing.assert_healthy(run)
    for each in found:
        assert each.message.removesuffix(".") in str(raised.value)
        assert f"step {each.step}" in str(raised.value)
        assert each.line in str(raised.value)
        assert each.detector in str(raised.value)
    assert all(entry.name != "test_assertions.py" or entry.locals for entry in raised.traceback)


def test_some_findings_are_named_and_others_allowed() -> None:
    run = train(lr=1e30)
    [worst] = [each for each in rg.explain(run) if each.severity == "critical"]
    rg.testing.assert_healthy(run, no=("missing-gradient",))
    for symptom in (worst, *worst.causes):
        with pytest.raises(AssertionError, match=re.escape(symptom.message.removesuffix("."))):
            rg.testing.assert_healthy(run, no=(symptom.detector,))
    assert worst.causes


def test_a_name_that_is_none() -> None:
    with pytest.raises(CallError, match="did you mean 'nan-forward'"):
        rg.testing.assert_healthy(train(), no=("nan_forward",))


def test_the_norm_of_gradients_is_that_of_torch() -> None:
    run, expected = train(lr=3.0), norms(3.0, 8)
    rg.testing.assert_healthy(run, no=(), max_grad_norm=max(expected) * 1.001)
    most = sorted(expected)[3]
    with pytest.raises(AssertionError) as raised:
        rg.testing.assert_healthy(run, no=(), max_grad_norm=most * 1.0001)
    above = [step for step, norm in enumerate(expected) if norm > most * 1.0001]
    largest = int(np.argmax(expected))
    assert f"is {expected[above[0]]:.3g}"[:6] in str(raised.value)
    assert f"at step {above[0]}, and" in str(raised.value)
    assert f"at most, at step {largest}; above in 4 of 8 steps" in str(raised.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_too_large(bad: float) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with rg.record(model) as run:
        for step in range(3):
            optimizer.zero_grad()
            (model(torch.ones(1, 2)).sum() * (bad if step == 1 else 1.0)).backward()
            optimizer.step()
    with pytest.raises(AssertionError, match=r"is (nan|inf) at step 1, .* above in 1 of 3 steps"):
        rg.testing.assert_healthy(run, no=(), max_grad_norm=1e9)


def test_where_nothing_was_recorded_nothing_is_healthy(tmp_path: Path) -> None:
    with rg.record(nn.Linear(2, 2)) as recording:
        pass
    with pytest.raises(AssertionError, match="nothing to check"):
        rg.testing.assert_healthy(recording)
    with rg.record(model := nn.Linear(2, 2), sites="*:output") as recording:
        model(torch.ones(1, 2))
    with pytest.raises(AssertionError, match="no norm of gradients was recorded"):
        rg.testing.assert_healthy(recording, no=(), max_grad_norm=1.0)
    with pytest.raises(NothingRecordedError):
        rg.testing.assert_healthy(7)  # type: ignore[arg-type]


def test_runs_that_are_the_same(tmp_path: Path) -> None:
    first = train(tmp_path / "first")
    rg.testing.assert_same(first, train())
    rg.testing.assert_same(tmp_path / "first", first.history, noise=[train()])


def test_the_first_difference_is_in_the_message() -> None:
    first, other = train(), train(lr=0.2)
    with pytest.raises(AssertionError) as raised:
        rg.testing.assert_same(first, other)
    comparison = rg.compare(first.history, other.history)
    assert str(raised.value) == str(comparison)
    assert str(raised.value).startswith("different: they diverge at ")
    assert comparison.parting is not None
    assert f"step {comparison.parting.step}" in str(raised.value)


def test_runs_of_two_models_cannot_be_compared() -> None:
    with rg.record({"a": nn.Linear(2, 2)}) as other:
        pass
    with pytest.raises(CompareError):
        rg.testing.assert_same(train(), other)
