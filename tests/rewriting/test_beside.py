"""What a rule is shown beside a gradient: the value that it is of, and what went into that very call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograd as rg
from retrograd.core.errors import CannotRewriteError, RuleError
from retrograd.rewriting.rewriting import rewrite
from retrograd.rewriting.rules.clipping import ClipNorm
from retrograd.rewriting.rules.rule import Rule, SiteState
from retrograd.rewriting.rules.simulation import simulate_rule
from tests.core.recording.test_relatives import CHECKPOINTS, Shared, train


class AddUp(Rule):
    """Leaves a gradient alone, and adds up what it makes of it and of what belongs to it."""

    needs_input = True

    def __init__(self, make: Callable[[Tensor, SiteState], Any]) -> None:
        super().__init__()
        self._make = make
        self.made: list[Any] = []

    def __call__(self, value: Tensor, state: SiteState) -> None:
        self.made.append((state.call, self._make(value, state)))


class AddUpBoth(AddUp):
    needs_value = True


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_the_gradient_of_a_weight_is_made_of_gradients_and_inputs(how: str) -> None:
    net = Shared(CHECKPOINTS[how]).double()
    linear = AddUp(lambda gradient, state: gradient.T @ state.input)
    bilinear = AddUp(
        lambda gradient, state: torch.einsum("bo,bi,bj->oij", gradient, state.inputs["input1"], state.inputs["input2"])
    )
    with rewrite(net, {"fc:output.grad": linear, "bi:output.grad": bilinear}):
        expected = train(net, micros=2)
    assert [call for call, _ in linear.made] == [3, 2, 1] * len(expected)
    for number, truth in enumerate(expected):
        made = [each for _, each in linear.made[3 * number : 3 * number + 3]]
        torch.testing.assert_close(made[0] + made[1] + made[2], truth["fc.weight"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(bilinear.made[number][1], truth["bi.weight"], rtol=1e-12, atol=1e-12)


def test_the_value_is_the_output_of_that_call() -> None:
    net = Shared().double()
    outputs: list[Tensor] = []
    rule = AddUpBoth(lambda gradient, state: state.value)
    with rewrite(net, {"fc:output.grad": rule}):
        handle = net.fc.register_forward_hook(lambda module, args, output: outputs.append(output.detach().clone()))
        net.relu.inplace = False
        train(net, steps=1)
        handle.remove()
    assert all(torch.equal(value, outputs[call - 1]) for call, value in rule.made)


def test_it_is_what_the_rules_on_inputs_have_made() -> None:
    net, x = nn.Linear(2, 2).double(), torch.randn(3, 2, dtype=torch.float64)
    rule = AddUp(lambda gradient, state: (state.input, gradient.T @ state.input))
    with rewrite(net, {"self:output.grad": rule, "self:input.input": lambda value, state: value * 3}):
        net(x).sum().backward()
    ((_, (seen, dw)),) = rule.made
    assert torch.equal(seen, x * 3)
    torch.testing.assert_close(dw, net.weight.grad)


def test_at_the_gradient_of_an_argument_there_are_all_arguments() -> None:
    net = nn.Bilinear(2, 2, 2)
    x, y = torch.randn(3, 2, requires_grad=True), torch.randn(3, 2)
    rule = AddUpBoth(lambda gradient, state: (state.value, dict(state.inputs)))
    with rewrite(net, {"self:input.input1.grad": rule}):
        net(x, y).sum().backward()
    ((_, (value, inputs)),) = rule.made
    assert torch.equal(value, x)
    assert list(inputs) == ["input1", "input2"]
    assert torch.equal(inputs["input2"], y)


def test_an_input_that_was_overwritten_is_an_error_and_no_wrong_number() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    rule = AddUp(lambda gradient, state: state.input)
    with rewrite(net, {"1:output.grad": rule}), pytest.raises(CannotRewriteError, match="overwritten in place"):
        net(torch.randn(3, 2)).sum().backward()
    assert rule.made == []


class Residual(Rule):
    """output + input, as a forward hook of three lines does it."""

    needs_input = True

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        return value + state.input


@pytest.mark.parametrize("use_reentrant", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_rule_on_an_output_computes_with_the_input(use_reentrant: bool | None) -> None:
    """Gradients flow through both, as through those of a forward hook."""
    net, x = nn.Linear(3, 3).double(), torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    call: Any = net if use_reentrant is None else partial(checkpoint, net, use_reentrant=use_reentrant)

    def read() -> list[Tensor]:
        x.grad = net.weight.grad = None
        out = call(x * 1)
        out.square().sum().backward()
        assert x.grad is not None
        assert net.weight.grad is not None
        return [out.detach(), x.grad, net.weight.grad]

    with rewrite(net, {"self:output": Residual()}):
        found = read()
        with torch.no_grad():
            assert torch.equal(net.eval()(x), net.forward(x) + x)
    handle = net.register_forward_hook(lambda module, args, output: output + args[0])
    assert all(torch.equal(one, other) for one, other in zip(found, read(), strict=True))
    handle.remove()


def test_a_rule_on_an_output_sees_all_arguments_by_name() -> None:
    net, x, y = nn.Bilinear(2, 2, 2), torch.randn(3, 2), torch.randn(3, 2)
    rule = AddUp(lambda value, state: dict(state.inputs))
    with rewrite(net, {"self:output": rule}):
        net(x, input2=y)
    ((_, inputs),) = rule.made
    assert list(inputs) == ["input1", "input2"]
    assert torch.equal(inputs["input2"], y)


def test_an_overwritten_input_is_not_shown_to_a_rule_on_the_output() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    with rewrite(net, {"1:output": Residual()}), pytest.raises(CannotRewriteError, match="overwritten in place"):
        net(torch.randn(3, 2))


def test_compiled_code_shows_no_input_to_a_rule_on_the_output() -> None:
    torch.compiler.reset()
    net = nn.Sequential(nn.Linear(2, 2))
    with rewrite(net, {"0:output": Residual()}), pytest.raises(CannotRewriteError, match="inside compiled code"):
        torch.compile(net, backend="eager")(torch.randn(3, 2))
    torch.compiler.reset()


@pytest.mark.parametrize("site", ["0:weight.grad", "0:weight", "0:input.input", "0:*"])
def test_where_there_is_no_input_such_a_rule_is_refused(site: str) -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(CannotRewriteError, match="asks for the input"):  # noqa: SIM117
        with rewrite(net, {site: AddUp(lambda gradient, state: None)}):
            net(torch.randn(3, 2)).sum().backward()


def test_a_rule_that_does_not_say_so_is_told_how() -> None:
    net = nn.Linear(2, 2)
    with (
        rewrite(net, {"self:output.grad": lambda gradient, state: gradient * state.input}),
        pytest.raises(RuleError, match="needs_input = True"),
    ):
        net(torch.randn(3, 2)).sum().backward()


def test_of_several_inputs_one_is_named() -> None:
    net = nn.Bilinear(2, 2, 2)
    with (
        rewrite(net, {"self:output.grad": AddUp(lambda gradient, state: state.input)}),
        pytest.raises(RuleError, match=r"state.inputs\['input1'\]"),
    ):
        net(torch.randn(3, 2), torch.randn(3, 2)).sum().backward()


def test_nothing_is_left_beside_the_rule() -> None:
    net, rule = nn.Linear(2, 2), AddUp(lambda gradient, state: None)
    with rewrite(net, {"self:output.grad": rule}):
        net(torch.randn(3, 2)).sum().backward()
    state = rule.state_at("self:output.grad")
    assert (state.value, dict(state.inputs)) == (None, {})


def test_a_simulation_shows_the_same() -> None:
    class TimesInput(Rule):
        needs_input = True

        def __call__(self, value: Tensor, state: SiteState) -> Tensor:
            return value * state.input

    net = Shared().double()
    net.relu.inplace = False
    with rg.record(net, tensors=["fc:outputs.grad", "fc:inputs"], sites="fc:output.grad") as recording:
        train(net)
    series = recording.history["fc:output.grad"]
    expected = {
        (g.step, g.call): (g.tensor * x.tensor).norm().item()  # type: ignore[operator, union-attr]
        for g, x in zip(series.tensors, series.input.tensors, strict=True)
    }
    table = simulate_rule(TimesInput(), recording.history, "fc:output.grad").table.to_pylist()
    assert len(table) == 9
    for row in table:
        call = int(row["site"].partition("#")[2][0])
        assert row["after"] == pytest.approx(expected[row["step"], call], rel=1e-6)
    with rg.record(net, tensors="fc:outputs.grad") as recording:
        train(net)
    with pytest.raises(RuleError, match=r"fc:inputs"):
        simulate_rule(TimesInput(), recording.history, "fc:output.grad")


def test_a_recording_put_back_goes_to_the_calls_that_it_is_of() -> None:
    net = Shared().double()
    net.relu.inplace = False
    state = {name: value.clone() for name, value in net.state_dict().items()}
    x = torch.randn(5, 4, dtype=torch.float64)
    with rg.record(net, tensors=rg.Keep("fc:outputs.grad", copy=True)) as recording:
        net(x).square().sum().backward()
    truth = net.fc.weight.grad.clone()  # type: ignore[union-attr]
    net.zero_grad()
    net.load_state_dict(state)
    with rewrite(net, {"fc:output.grad": rg.rules.Substitute(recording.history["fc:output.grad"])}):
        (3 * net(x).square().sum()).backward()
    torch.testing.assert_close(net.fc.weight.grad, truth, rtol=1e-12, atol=1e-12)


class Odd(nn.Module):
    """Has parameters that are called like slots, and like kinds of them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)
        for name in ("output", "outputs", "parameters_", "inputs"):
            self.register_parameter(name, nn.Parameter(torch.randn(3)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(self.fc(x).tanh()) * self.output * self.outputs
        return self.norm(x) * self.parameters_ * self.inputs


def test_all_parameters_are_clipped_and_nothing_else() -> None:
    net, bare = Odd().double(), Odd().double()
    bare.load_state_dict(net.state_dict())
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    with rewrite(net, {"*:parameters.grad": ClipNorm(0.1)}):
        (net(x) * 100).square().sum().backward()
    (bare(y) * 100).square().sum().backward()
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
    for (name, ours), (_, theirs) in zip(net.named_parameters(), bare.named_parameters(), strict=True):
        norm = theirs.grad.norm()  # type: ignore[union-attr]
        torch.testing.assert_close(ours.grad, theirs.grad * (0.1 / norm).clamp(max=1), rtol=1e-5, atol=0)
        assert norm > 0.1, name


def test_one_call_has_a_rule_and_others_none() -> None:
    net = Shared().double()
    net.relu.inplace = False
    seen: list[tuple[str, int]] = []

    def note(name: str) -> Callable[[Tensor, SiteState], None]:
        return lambda value, state: seen.append((name, state.call))

    rules = {"fc#1:output.grad": note("one"), "fc#*:outputs.grad": note("all"), "fc#3:inputs": note("in")}
    with rewrite(net, rules):
        train(net, steps=1)
    trained = [each for each in seen if each[0] != "in"]
    assert sorted(set(trained)) == [("all", 1), ("all", 2), ("all", 3), ("one", 1)]
    assert {call for name, call in seen if name == "in"} == {3}
