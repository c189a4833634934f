"""A policy that has nothing to do, and a budget that nothing can meet, say so once."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from retrograd.core.errors import BudgetError, RetrogradWarning
from retrograd.memory.budget.planned import Planned
from retrograd.memory.policies.disk import Disk
from retrograd.memory.policies.policy import AsIs, Packed, Policy, Saved
from retrograd.memory.policies.precision import Bfloat16
from retrograd.memory.policies.recompute import Recompute
from retrograd.memory.saved.keeping import Policies, keep_saved


class Refusing(Policy):
    """Is offered everything, and leaves it."""

    min_bytes = 1

    def pack(self, saved: Saved) -> Packed | None:
        return None


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())


def messages(policy: Policies, *, passes: int = 3) -> list[warnings.WarningMessage]:
    model = make_model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with keep_saved(model, policy):
            for _ in range(passes):
                model(torch.randn(128, 64)).sum().backward()
    return [each for each in caught if issubclass(each.category, RetrogradWarning)]


def test_all_is_too_small(tmp_path: Path) -> None:
    (message,) = messages(Disk(tmp_path))
    assert "the largest of what is saved has 32.8 kB" in str(message.message)  # 128 · 64 · 4 bytes
    assert "smaller than 262 kB" in str(message.message)
    assert message.filename == __file__


def test_all_was_left() -> None:
    (message,) = messages(Refusing())
    assert "left all that it was offered" in str(message.message)


def test_each_policy_tells_for_itself(tmp_path: Path) -> None:
    told = messages({"0": Disk(tmp_path), "1": Refusing(), "*": Disk(tmp_path, min_bytes=1)})
    assert [type(each).__name__ for each in told] == ["WarningMessage"] * 2


@pytest.mark.parametrize("policy", [AsIs(), Recompute(), Bfloat16(min_bytes=1), {"1": AsIs()}])
def test_others_have_nothing_to_say(policy: Policies) -> None:
    assert not messages(policy)


def test_nothing_counts_for_a_budget(tmp_path: Path) -> None:
    (message,) = messages(Planned("1B", folder=tmp_path, min_bytes=40_000))
    assert "has taken nothing" in str(message.message)


def test_a_budget_that_nothing_can_meet(tmp_path: Path) -> None:
    (message,) = messages(Planned("1B", folder=tmp_path), passes=1)
    assert "budget of 1 B cannot be met: a single tensor that was saved has 32.8 kB" in str(message.message)
    assert message.filename == __file__
    with pytest.raises(BudgetError, match="at least"):
        messages(Planned("1B", folder=tmp_path), passes=2)
    assert not messages(Planned("1MB", folder=tmp_path), passes=1)


def test_warnings_that_are_errors_do_not_end_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with keep_saved(model, Disk(tmp_path)):
            model(torch.randn(128, 64)).sum().backward()
    assert "has taken nothing" in capsys.readouterr().err
    assert model[0].weight.grad is not None
