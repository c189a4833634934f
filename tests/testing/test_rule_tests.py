"""The contract test finds what it is there to find."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from retrograd.rewriting.rules import Rule, SiteState
from retrograd.testing.rule_tests import RuleTests


class Good(Rule):
    """Damps by the running norm."""

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        norm = state.ema("norm", 0.9)
        norm.add(value.norm())
        return value / torch.where(norm.count > 0, norm.value, 1).to(value.device)


class WritesIntoItsArgument(Good):
    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        return value.mul_(0.5)


class WritesPastTheCounter(Good):
    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        value.data.mul_(0.5)
        return value


class ReturnsAnotherType(Good):
    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        return value.double()


class ReturnsAnotherShape(Good):
    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        return value[:1]


class HoldsTheGraph(Good):
    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        state.last_seen = value  # type: ignore[attr-defined]
        return value * 2


class RemembersOnItself(Good):
    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        self._calls += 1
        return value * (self._calls % 13)


class WritesIntoItsMemory(Good):
    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        total = state.get("total")
        if total is None:
            total = torch.zeros(())
        total += 1
        state._kept["total"] = total
        return value * total

    def state_dict(self) -> dict[str, object]:
        return {site: dict(state.snapshot()) for site, state in self._states.items()}


class TakesNanIn(Good):
    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        norm = 0.9 * state.get("norm", 1.0) + 0.1 * value.norm()
        state.put("norm", norm)
        return value / norm


class WaitsForTheDevice(Good):
    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        return value / value.norm() if value.norm() > 1 else value


def failing(kind: type[Rule]) -> set[str]:
    class Contract(RuleTests):
        def make_rule(self) -> Rule:
            return kind()

    found = set()
    for name in dir(Contract):
        if name.startswith("test_"):
            try:
                getattr(Contract(), name)()
            except (AssertionError, RuntimeError, TypeError, NotImplementedError):
                found.add(name)
    return found


def test_a_good_rule_passes() -> None:
    assert failing(Good) == set()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (WritesIntoItsArgument, "test_it_does_not_write_into_its_argument"),
        (WritesPastTheCounter, "test_it_does_not_write_into_its_argument"),
        (ReturnsAnotherType, "test_it_returns_none_or_a_tensor_of_the_same_form"),
        (ReturnsAnotherShape, "test_it_returns_none_or_a_tensor_of_the_same_form"),
        (HoldsTheGraph, "test_it_holds_no_graph"),
        (RemembersOnItself, "test_it_goes_on_alike_after_a_checkpoint"),
        (WritesIntoItsMemory, "test_a_state_that_was_saved_does_not_change"),
        (TakesNanIn, "test_what_is_not_finite_poisons_nothing"),
        (WaitsForTheDevice, "test_it_never_waits_for_the_device"),
    ],
)
def test_a_fault_is_found(kind: type[Rule], name: str) -> None:
    assert name in failing(kind)


def test_it_needs_no_test_runner() -> None:
    code = "import sys, retrograd.testing.rule_tests; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
