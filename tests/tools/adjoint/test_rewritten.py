"""A backward that hooks or rules change is meant to differ, and said to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from retrograd.core.hooks.rewriters import gradient_rewriters
from retrograd.core.sites.site import Site
from retrograd.tools.adjoint.adjoint_check import Verdict
from retrograd.tools.adjoint.check import check_adjoint
from tests.tools.adjoint.planted import linear, saving

BATCH = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).tanh())


def verdicts(model: nn.Module) -> dict[str, Verdict]:
    return {str(row.site): row.verdict for row in check_adjoint(model, BATCH)}


def doubled(module: nn.Module, args: object, output: Tensor) -> None:
    output.register_hook(lambda gradient: gradient * 2)


def test_a_forward_hook_that_hooks_the_output() -> None:
    model = Net()
    model.body.register_forward_hook(doubled)
    check = check_adjoint(model, BATCH)
    assert check
    found = {str(row.site): row for row in check if row.verdict is Verdict.REWRITTEN}
    assert found.keys() == {"self:input.x", "body:input.input", "body:weight", "body:bias"}
    for row in found.values():
        assert row.backward / row.forward == pytest.approx(2, rel=1e-6)
        assert "a hook changes the gradient" in row.reason
    assert {row.verdict for row in check if str(row.site) not in found} == {Verdict.OK}
    assert "rewritten" in str(check)


def test_full_backward_hooks() -> None:
    model = Net()
    model.body.register_full_backward_hook(lambda module, grad_in, grad_out: (-grad_in[0],))
    found = verdicts(model)
    assert found["body:input.input"] is found["self:input.x"] is Verdict.REWRITTEN
    assert found["body:weight"] is found["stem:weight"] is Verdict.OK


def test_a_hook_in_the_modules_own_code() -> None:
    class Reversal(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            if x.requires_grad:
                x.register_hook(lambda gradient: -gradient)
            return x

    (row,) = check_adjoint(Reversal(), BATCH)
    assert row.verdict is Verdict.REWRITTEN
    assert row.backward == pytest.approx(-row.forward)


def test_hooks_that_only_look_change_no_verdict() -> None:
    model = Net()
    seen: list[Tensor] = []
    model.body.register_forward_hook(lambda module, args, output: output.register_hook(seen.append) and None)
    assert set(verdicts(model).values()) == {Verdict.OK}


def test_hooks_that_change_the_forward_are_part_of_the_model() -> None:
    model = Net()
    model.body.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    model.body.register_forward_hook(lambda module, args, output: output.sin())
    assert set(verdicts(model).values()) == {Verdict.OK}


def test_a_wrong_backward_under_a_hook_stays_wrong() -> None:
    torch.manual_seed(1)
    model = Net()
    model.body = linear("missing factor")
    model.body.register_forward_hook(
        lambda module, args, output: output.register_hook(lambda gradient: gradient * 3) and None
    )
    found = verdicts(model)
    assert found["body:weight"] is Verdict.WRONG
    assert found["body:bias"] is Verdict.REWRITTEN


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm.*:FutureWarning")
@pytest.mark.parametrize("fault", ["", "missing factor"])
def test_a_weight_that_a_hook_computes(fault: str) -> None:
    """Without its hook it depends on nothing: that is no reason to call a wrong backward rewritten."""
    torch.manual_seed(1)
    layer = torch.nn.utils.weight_norm(linear(fault))
    check = check_adjoint(layer, BATCH)
    assert {str(row.site) for row in check} == {"self:input.x", "self:bias", "self:weight_g", "self:weight_v"}
    assert {str(row.site) for row in check.faults} == ({"self:weight_g", "self:weight_v"} if fault else set())


def unsteady(factors: Callable[[int], float], hooks: str) -> nn.Module:
    """Twice its input. Its n-th backward gives that many times the gradient: 2 is right."""
    runs = itertools.count(1)
    twice = saving(lambda x: 2 * x, lambda gradient, x: factors(next(runs)) * gradient)

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if hooks == "of a tensor" and x.requires_grad:
                x.register_hook(lambda gradient: None)
            return twice(x)

    module = Module()
    if hooks == "of the module":
        module.register_forward_hook(lambda module, args, output: None)
    return module


@pytest.mark.parametrize("hooks", ["", "of the module", "of a tensor"])
@pytest.mark.parametrize(
    "factors",
    [lambda n: 3 if n == 1 else 2, lambda n: 2 if n == 1 else 3, lambda n: 2 + n % 2],
    ids=["the first is wrong", "the first is right", "each second one"],
)
def test_a_backward_that_changes_from_run_to_run_is_no_hooks_doing(factors: Callable[[int], float], hooks: str) -> None:
    check = check_adjoint(unsteady(factors, hooks), BATCH)
    assert not check
    assert [row.verdict for row in check] == [Verdict.RANDOM]


def test_one_that_is_right_from_the_third_run_on_is_not_rewritten() -> None:
    (row,) = check_adjoint(unsteady(lambda n: 3 if n < 3 else 2, ""), BATCH)
    assert row.verdict is Verdict.RANDOM


class Rules:
    """Stands for a rewriting that is in force: rules on gradients, by site."""

    def __init__(self, model: nn.Module, rules: dict[str, float]) -> None:
        self._modules = set(model.modules())
        self._rules = rules
        self.asked: list[str] = []

    def try_rules(self, module: nn.Module, site: Site, gradient: Tensor) -> Tensor:
        assert module in self._modules
        self.asked.append(str(site))
        factor = self._rules.get(str(site))
        return gradient if factor is None else gradient * factor


@pytest.fixture
def model_with_rules() -> Iterator[tuple[nn.Module, Rules]]:
    model = Net()
    rules = Rules(model, {"body:output.grad": 0.5, "head:bias.grad": 0.0, "stem:input.input.grad": 3.0})
    gradient_rewriters.add(rules)
    yield model, rules
    gradient_rewriters.remove(rules)


def test_rules_of_ours_are_tried_on_what_a_right_backward_gives(model_with_rules: tuple[nn.Module, Rules]) -> None:
    model, _ = model_with_rules
    check = check_adjoint(model, BATCH)
    assert check
    ratios = {str(row.site): row.backward / row.forward for row in check if row.verdict is Verdict.REWRITTEN}
    assert ratios == pytest.approx(
        {"body:input.input": 0.5, "body:weight": 0.5, "body:bias": 0.5, "head:bias": 0.0, "stem:input.input": 3.0}
    )
    assert all("a rule changes the gradient" in row.reason for row in check if row.verdict is Verdict.REWRITTEN)
    assert {row.verdict for row in check if row.caller_name == "self"} == {Verdict.OK}
