"""Several rules: on one site, on shared modules, on one tensor that is the result of two modules; and others' hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograd.core.errors import NoSuchSiteError, PatternError, RewriteError, RuleError
from retrograd.rewriting.rewriting import rewrite
from retrograd.rewriting.rules.rule import SiteState
from tests.rewriting.models import assert_same, gradients, halve, make_net


def times(factor: float) -> Any:
    return lambda value, state: value * factor


def plus(number: float) -> Any:
    return lambda value, state: value + number


class Wrapped(nn.Module):
    """Hands on what its child returns."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x)


@pytest.mark.parametrize(
    "rules",
    [
        {"self:output*": [times(2), plus(1), times(3)]},
        {"self:output*": times(2), "self:out*": plus(1), lambda c: c.site.slot == "output": times(3)},
        {"self:output*": (times(2), plus(1)), "re:output": times(3)},
    ],
)
def test_in_the_order_given(rules: Any) -> None:
    net, x = nn.Tanh(), torch.tensor([0.5], requires_grad=True)
    with rewrite(net, rules):
        out = net(x)
        out.backward(torch.ones(1))
    h = torch.tanh(x)
    assert torch.equal(out, (h * 2 + 1) * 3)
    derivative = ((1.0 * 2 + 1) * 3) * 6  # the rules on the gradient, then through those on the value
    torch.testing.assert_close(x.grad, derivative * (1 - h.detach() ** 2))


def test_outer_rules_come_first_in_the_backward_pass() -> None:
    net, x = Wrapped(Wrapped(nn.Tanh())), torch.zeros(1, requires_grad=True)
    rules = {"child.child:output.grad": times(3), "self:output.grad": plus(1), "child:output.grad": times(2)}
    with rewrite(net, rules):
        net(x).backward(torch.ones(1))
    assert x.grad is not None
    assert x.grad.item() == ((1 + 1) * 2) * 3


def test_inner_rules_come_first_in_the_forward() -> None:
    net, x = Wrapped(Wrapped(nn.Identity())), torch.ones(1)
    rules = {"self:output": plus(1), "child:output": times(2), "child.child:output": times(3)}
    with rewrite(net, rules):
        assert net(x).item() == 7


def test_two_rewritings_at_once_and_the_first_removed_first() -> None:
    net, x = nn.Tanh(), torch.zeros(1, requires_grad=True)
    first = rewrite(net, {"self:output": times(2), "self:output.grad": times(2)})
    second = rewrite(net, {"self:output": plus(1), "self:output.grad": plus(1)})
    out = net(x)
    out.backward(torch.ones(1))
    assert out.item() == 1
    assert x.grad is not None
    assert x.grad.item() == (1 + 1) * 2 * 2  # the later rules, the earlier ones, and the doubling of the value
    first.remove()
    assert net(x).item() == 1
    second.remove()
    assert net(x).item() == 0
    assert not net._forward_hooks
    assert not net._forward_pre_hooks


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.cell(x))
        return x


def test_calls_of_a_shared_module() -> None:
    net, x = Loop(), torch.randn(4, 2)
    seen: list[tuple[str, int]] = []

    def note(value: Tensor, state: SiteState) -> None:
        seen.append((state.site, state.call))

    with rewrite(net, {"cell:output.grad": note, "cell#2:output.grad": halve, "cell#3:output": plus(1)}):
        for _ in range(2):
            net.zero_grad()
            out = net(x)
            out.sum().backward()
    found = gradients(net)
    assert seen == [("cell:output.grad", call) for call in (3, 2, 1)] * 2
    net.zero_grad()
    h = torch.tanh(net.cell(x))
    h = net.cell(h)
    h.register_hook(lambda gradient: gradient * 0.5)
    h = torch.tanh(net.cell(torch.tanh(h)) + 1)
    assert torch.equal(h, out)
    h.sum().backward()
    assert_same(found, gradients(net))


@pytest.mark.parametrize("sites", [["0:output"], ["0:output.grad"], ["0:input.input"], ["2:weight", "0:output"]])
def test_calls_begin_anew_without_the_root(sites: list[str]) -> None:
    """Parts of a model may be called by themselves, step after step."""
    net, seen = make_net(), []

    def note(value: Tensor, state: SiteState) -> None:
        seen.append(state.call)

    with rewrite(net, dict.fromkeys(sites, note)):
        for _ in range(3):
            net[1:](net[0](torch.randn(2, 3))).sum().backward()
    assert seen == [1] * 3 * len(sites)


def test_more_calls_than_have_places_of_their_own() -> None:
    cell, seen = nn.Linear(2, 2), []

    def note(value: Tensor, state: SiteState) -> None:
        seen.append(state.call)

    with rewrite(cell, {"self:output": note, "self#101:output": plus(1), "self#120:output": plus(2)}):
        x = torch.zeros(1, 2)
        outs = [cell(x) for _ in range(125)]
    assert seen == list(range(1, 126))
    changed = [number for number, out in enumerate(outs, 1) if not torch.equal(out, outs[0])]
    assert changed == [101, 120]


def test_calls_go_on_where_a_forward_runs_a_pass_of_its_own() -> None:
    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
            return self.energy(force)

    net, seen = Forces(), []

    def note(value: Tensor, state: SiteState) -> None:
        seen.append(state.call)

    with rewrite(net, {"energy:output": note}):
        net(torch.randn(3, 2)).sum().backward()
        net(torch.randn(3, 2)).sum().backward()
    assert seen == [1, 2, 1, 2]


def test_a_module_under_two_paths_has_one_site() -> None:
    """Named by its first path, as ``named_modules`` does."""
    shared = nn.Linear(2, 2)
    net = nn.Sequential(shared, nn.Tanh(), shared)
    with rewrite(net, {"0:output": plus(1)}):
        out = net(torch.zeros(1, 2))
    expected = shared(torch.tanh(shared(torch.zeros(1, 2)) + 1)) + 1
    assert torch.equal(out, expected)
    with pytest.raises(NoSuchSiteError):
        rewrite(net, {"2:output": plus(1)})


def test_tensor_hooks_of_the_user() -> None:
    """Those within the module and those set later both see what the rules return."""
    seen: list[float] = []

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = x * 1.0
            out.register_hook(lambda gradient: seen.append(gradient.item()))
            return out

    net, x = Net(), torch.zeros(1, requires_grad=True)
    with rewrite(net, {"self:output.grad": times(10)}):
        out = net(x)
        out.register_hook(lambda gradient: gradient + 1)
        out.register_hook(lambda gradient: seen.append(gradient.item()))
        out.retain_grad()
        out.backward(torch.ones(1))
    assert seen == [10.0, 11.0]
    assert out.grad is not None
    assert out.grad.item() == 11.0
    assert x.grad is not None
    assert x.grad.item() == 11.0


def test_forward_hooks_of_the_user() -> None:
    net, x = nn.Tanh(), torch.zeros(1)
    net.register_forward_hook(lambda module, args, output: output + 1)
    with rewrite(net, {"self:output": times(2), "self:input.input": plus(0)}):
        net.register_forward_hook(lambda module, args, output: output + 10)
        assert net(x).item() == (0 + 1) * 2 + 10


def test_full_backward_hooks_of_the_user() -> None:
    seen: dict[str, float] = {}

    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> tuple[Tensor]:
        seen.update(into=grad_input[0].item(), out=grad_output[0].item())
        return (grad_input[0] * 7,)

    net, x = nn.Sequential(nn.Linear(1, 1), nn.Tanh()), torch.zeros(1, 1)
    handle = net[1].register_full_backward_hook(hook)
    with rewrite(net, {"1:output.grad": times(3), "1:input.input.grad": times(5)}):
        net(x).backward(torch.ones(1, 1))
    handle.remove()
    derivative = 1 - net(x).item() ** 2
    assert seen["out"] == 1.0
    assert net[0].bias.grad is not None
    assert net[0].bias.grad.item() == pytest.approx(3 * derivative * 5 * 7)


def test_damping_beside_hooks_of_the_user() -> None:
    """A net that is trained with hooks of its own gets rules besides."""
    net, x = make_net(), torch.randn(5, 3)
    for module in net:
        module.register_forward_hook(
            lambda module, args, output: output.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1)) and None
        )
    with rewrite(net, {"2:output.grad": halve}):
        net(x).square().sum().backward()
    found = gradients(net)
    net.zero_grad()
    before = net[2]._forward_hooks.copy()
    net[2]._forward_hooks.clear()
    handle = net[2].register_forward_hook(
        lambda module, args, output: output.register_hook(lambda gradient: (gradient * 0.5).clamp(-0.1, 0.1)) and None
    )
    net(x).square().sum().backward()
    handle.remove()
    net[2]._forward_hooks.update(before)
    assert_same(found, gradients(net))


@pytest.mark.parametrize(
    ("rules", "error"),
    [
        ({}, RewriteError),
        (None, RewriteError),
        ([halve], RewriteError),
        ({"0": halve}, PatternError),
        ({"*": halve}, PatternError),
        ({"nowhere:output": halve}, NoSuchSiteError),
        ({"0:output": 3}, RuleError),
        ({"0:output": [halve, None]}, RuleError),
        ({"0:output": []}, RewriteError),
        ({3: halve}, PatternError),
    ],
)
def test_what_is_refused_leaves_nothing(rules: Any, error: type[Exception]) -> None:
    net = make_net()
    with pytest.raises(error):
        rewrite(net, rules)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert not any(parameter._backward_hooks for parameter in net.parameters())
