"""Nested tensors in jagged layout, beside the same elements packed in one dense tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograd.core.errors import RuleError
from retrograd.core.recording.record import watch
from retrograd.rewriting.rewriting import rewrite
from retrograd.rewriting.rules.clipping import ClipNorm, SkipStep, ZClip
from retrograd.rewriting.rules.elements import ClipValue
from retrograd.rewriting.rules.norm_rule import NormRule, measure_norm
from retrograd.rewriting.rules.rule import Rule, SiteState
from tests.rewriting.models import assert_same, gradients, halve

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4)
        self.relu = nn.ReLU()
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.relu(watch("hidden", self.first(x))))
        return out


def make_jagged() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(length, 3, generator=generator) for length in (2, 4, 1)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


class ByActivation(Rule):
    needs_value = True

    def __call__(self, gradient: Tensor, state: SiteState) -> Tensor:
        assert state.value is not None
        return gradient * state.value


SITES = [
    "first:output", "relu:output", "relu:input.input", "watch/hidden", "first:weight",
    "first:output.grad", "relu:output.grad", "last:input.input.grad", "relu:input.input.grad", "watch/hidden.grad",
    "last:output.grad", "first:weight.grad",
]  # fmt: skip
RULES: list[Callable[[], Any]] = [
    lambda: halve, lambda: ClipNorm(0.1), ByActivation, lambda: ZClip(warmup=1, max_norm=0.01)
]  # fmt: skip


@pytest.mark.parametrize("make", RULES)
@pytest.mark.parametrize("site", SITES)
def test_as_on_packed_elements(site: str, make: Callable[[], Any]) -> None:
    if make is ByActivation and not site.endswith(".grad"):
        return
    found = []
    for x in (make_jagged(), make_jagged().values()):
        net = Net()
        with rewrite(net, {site: make()}):
            for _ in range(3):
                out = net(x)
                (out.values() if out.is_nested else out).square().sum().backward()
        found.append(gradients(net))
    assert_same(*found)


@pytest.mark.parametrize("make", [lambda: ClipNorm(1.0), lambda: SkipStep(size=4)])
def test_norms(make: Callable[[], NormRule]) -> None:
    rule, other = make(), make()
    for step in range(8):
        value = make_jagged() * (100 if step == 6 else 1 + 0.01 * step)
        torch.testing.assert_close(measure_norm(value), value.values().square().sum().sqrt())
        result = rule(value, rule.state_at("site"))
        assert result.shape == value.shape
        assert torch.equal(result.values(), other(value.values(), other.state_at("site")))


def test_what_is_not_packed_is_refused() -> None:
    """Between its parts lie elements that are none of it."""
    holes = torch.nested.narrow(
        torch.randn(2, 5, 3), 1, torch.tensor([0, 1]), torch.tensor([2, 3]), layout=torch.jagged
    )
    for value in (holes, make_jagged().transpose(1, 2)):
        with pytest.raises(RuleError, match="jagged"):
            measure_norm(value)


def test_rules_on_elements_are_refused() -> None:
    net = Net()
    with rewrite(net, {"relu:output.grad": ClipValue(0.1)}), pytest.raises(RuleError, match="dense"):
        net(make_jagged()).values().sum().backward()
