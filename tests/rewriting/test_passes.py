"""Several passes: over one graph, over gradients, inside each other, and those that ask for some gradients alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograd.rewriting.rewriting import rewrite
from retrograd.rewriting.rules.rule import Rule, SiteState
from tests.rewriting.models import Changed, assert_same, gradients, halve, hooked_outputs, make_net


def soft(gradient: Tensor, *_: Any) -> Tensor:
    """Smooth and not linear, so that its derivative shows."""
    return torch.tanh(gradient) * 3 + gradient**2


RULES = {"1:output.grad": soft, "2:output.grad": soft}


def penalty(net: nn.Module, x: Tensor) -> Tensor:
    """As for a critic: its second pass goes through what the rules made of the first."""
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def test_a_gradient_penalty_as_with_bare_hooks() -> None:
    """In the second pass the rules act on what flows there, too."""
    net = make_net().double()
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    with rewrite(net, RULES):
        value = penalty(net, x)
        value.backward()
    found = {**gradients(net), "x": x.grad, "value": value}
    net.zero_grad()
    x.grad = None
    with hooked_outputs({net[1]: soft, net[2]: soft}):
        value = penalty(net, x)
        value.backward()
    assert_same(found, {**gradients(net), "x": x.grad, "value": value})  # type: ignore[dict-item]


def test_the_rewritten_gradient_is_differentiable() -> None:
    """Where the second pass meets no rules, it finds the derivative of what the first has found: by differences."""
    net = make_net().double()
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    with rewrite(net, RULES):
        value = penalty(net, x)
    value.backward()
    found = gradients(net)
    step = 1e-6
    for name, parameter in net.named_parameters():
        if name == "4.bias":
            continue
        flat = parameter.data.view(-1)
        values = []
        for sign in (1, -1):
            flat[0] += sign * step
            with rewrite(net, RULES):
                values.append(penalty(net, x).item())
            flat[0] -= sign * step
        torch.testing.assert_close(
            found[name].view(-1)[0].item(), (values[0] - values[1]) / (2 * step), rtol=1e-5, atol=1e-7
        )


def test_as_a_function_written_by_hand() -> None:
    net = make_net().double()
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)

    def by_hand(x: Tensor) -> Tensor:
        h = net[1](net[0](x))
        return net[4](net[3](Changed.apply(net[2](Changed.apply(h, soft)), soft)))

    with rewrite(net, RULES):
        (found,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(by_hand(x).sum(), x, create_graph=True)
    torch.testing.assert_close(found, expected)
    assert found.requires_grad


def test_inputs_of_a_pass() -> None:
    net, x = make_net(), torch.randn(5, 3)
    with rewrite(net, {"1:output.grad": halve, "*:weight.grad": halve}):
        net(x).sum().backward(inputs=[net[0].weight])
    found = gradients(net)
    assert found.keys() == {"0.weight"}
    net.zero_grad()
    net(x).sum().backward()
    assert torch.equal(found["0.weight"], gradients(net)["0.weight"] * 0.25)


def test_the_gradient_of_an_activation() -> None:
    """What is asked for is what the rules returned."""
    net, x = make_net(), torch.randn(5, 3)
    seen: list[Tensor] = []
    with rewrite(net, {"1:output.grad": halve}):
        net[1].register_forward_hook(lambda module, args, output: seen.append(output))
        out = net(x)
        (found,) = torch.autograd.grad(out.sum(), seen[-1])
    out = net(x)
    (expected,) = torch.autograd.grad(out.sum(), seen[-1])
    assert torch.equal(found, expected * 0.5)


def test_a_pass_inside_a_rule() -> None:
    """A rule may compute gradients of its own."""
    helper = nn.Linear(1, 1)

    def nested(gradient: Tensor, state: SiteState) -> Tensor:
        with torch.enable_grad():
            point = torch.ones(1, 1, requires_grad=True)
            (slope,) = torch.autograd.grad(helper(point).square().sum(), point)
        return gradient * slope.detach()

    net, x = make_net(), torch.randn(5, 3)
    with rewrite(net, {"1:output.grad": nested}):
        net(x).sum().backward()
    found = gradients(net)
    net.zero_grad()
    slope = (2 * helper(torch.ones(1, 1)) * helper.weight).detach()
    h = torch.tanh(net[0](x))
    h.register_hook(lambda gradient: gradient * slope)
    net[2:](h).sum().backward()
    for name, each in gradients(net).items():
        torch.testing.assert_close(found[name], each)


def test_the_rewritten_model_inside_a_hook() -> None:
    """Its calls there are new ones, beside those of the forward; but rules learn nothing from a pass within."""
    net, x = make_net(), torch.randn(5, 3)

    def nested(gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            point = torch.ones(1, 3, requires_grad=True)
            (slope,) = torch.autograd.grad(net(point).sum(), point)
        return gradient * slope.sum()

    with rewrite(net, {"0:output": halve}):
        out = net(x)
        out.register_hook(nested)
        out.sum().backward()
    found = gradients(net)
    net.zero_grad()
    point = torch.ones(1, 3, requires_grad=True)
    (slope,) = torch.autograd.grad(net[1:](net[0](point) * 0.5).sum(), point)
    (net[1:](net[0](x) * 0.5).sum() * slope.sum()).backward()
    for name, each in gradients(net).items():
        torch.testing.assert_close(found[name], each)


class NoteGradMode(Rule):
    def __init__(self) -> None:
        super().__init__()
        self._modes: list[bool] = []

    def __call__(self, value: Tensor, state: SiteState) -> None:
        self._modes.append(torch.is_grad_enabled())


def test_rules_run_in_the_grad_mode_of_the_pass() -> None:
    net, x, rule = make_net(), torch.randn(5, 3), NoteGradMode()
    with rewrite(net, {"1:output.grad": rule}):
        net(x).sum().backward()
        torch.autograd.grad(net(x).sum(), list(net.parameters()), create_graph=True)
    assert rule._modes == [False, True]


def test_a_pass_that_fails_and_one_after_it() -> None:
    net, x = make_net(), torch.randn(5, 3)
    with rewrite(net, {"1:output.grad": halve}):
        out = net(x)
        out.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            out.sum().backward()
        net.zero_grad()
        net(x).sum().backward()
    found = gradients(net)
    net.zero_grad()
    h = torch.tanh(net[0](x))
    h.register_hook(lambda gradient: gradient * 0.5)
    net[2:](h).sum().backward()
    assert_same(found, gradients(net))


def test_forward_mode_passes_through_rules_on_values_and_not_on_gradients() -> None:
    net, x = make_net(), torch.randn(2, 3)
    tangent = torch.randn(2, 3)
    with rewrite(net, {"1:output": halve, "1:output.grad": halve}):
        _, found = torch.func.jvp(net, (x,), (tangent,))
    _, expected = torch.func.jvp(lambda y: net[2:](net[:2](y) * 0.5), (x,), (tangent,))
    torch.testing.assert_close(found, expected)


def test_vmapped_gradients_act_on_each_part_of_the_batch() -> None:
    """``is_grads_batched`` hands rules a batched gradient, which they treat as one."""
    net, x = make_net(), torch.randn(2, 3, requires_grad=True)
    with rewrite(net, {"1:output.grad": halve}):
        (found,) = torch.autograd.grad(net(x), x, torch.eye(2).unsqueeze(-1), is_grads_batched=True)
    (expected,) = torch.autograd.grad(net(x), x, torch.eye(2).unsqueeze(-1), is_grads_batched=True)
    torch.testing.assert_close(found, expected * 0.5)


def test_an_evaluation_in_between_leaves_the_count_of_calls_as_it_was() -> None:
    net, seen = nn.Linear(2, 2), []

    def note(value: Tensor, state: SiteState) -> None:
        seen.append((torch.is_grad_enabled(), state.call))

    with rewrite(net, {"self:output": note}):
        for _ in range(2):
            with torch.no_grad():
                net(torch.ones(1, 2))
                net(torch.ones(1, 2))
            first = net(torch.ones(1, 2))
            with torch.no_grad():
                net(torch.ones(1, 2))
            (first + net(torch.ones(1, 2))).sum().backward()
    assert seen == [(False, 1), (False, 1), (True, 1), (False, 1), (True, 2)] * 2
