"""Rules on what modules return: values, gradients, and nests of both."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from retrograd.core.errors import CannotRewriteError
from retrograd.rewriting.rewriting import rewrite
from retrograd.rewriting.rules.rule import SiteState
from tests.rewriting.models import add_one, assert_same, gradients, halve, leave, make_net


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class Result:
    logits: Tensor
    hidden: tuple[Tensor, Tensor]
    note: str


def test_a_value_takes_the_place_of_the_output() -> None:
    net, x = make_net(), torch.randn(5, 3)
    with rewrite(net, {"1:output": halve, "3:output": add_one}):
        found = net(x)
    h = torch.tanh(net[0](x)) * 0.5
    assert torch.equal(found, net[4](nn.functional.softplus(net[2](h)) + 1))


def test_the_gradient_passes_through_a_rule_on_a_value() -> None:
    net, x = make_net().double(), torch.randn(5, 3, dtype=torch.float64)
    with rewrite(net, {"1:output": lambda value, state: value**2}):
        net(x).sum().backward()
    found = gradients(net)
    net.zero_grad()
    net[4](net[3](net[2](net[1](net[0](x)) ** 2))).sum().backward()
    assert_same(found, gradients(net))


def test_a_rule_that_changes_nothing_leaves_the_very_objects() -> None:
    net, x = make_net(), torch.randn(5, 3)
    seen: list[Any] = []
    net[1].register_forward_hook(lambda module, args, output: seen.append(output))
    with rewrite(net, {"1:output": leave, "1:output.grad": leave}):
        net[1].register_forward_hook(lambda module, args, output: seen.append(output))
        out = net(x)
    assert seen[0] is seen[1]
    plain = net(x)
    out.sum().backward()
    found = gradients(net)
    net.zero_grad()
    plain.sum().backward()
    assert_same(found, gradients(net))


class Returns(nn.Module):
    """Returns what it is told to make of two tensors."""

    def __init__(self, build: Any) -> None:
        super().__init__()
        self.build = build

    def forward(self, a: Tensor, b: Tensor) -> Any:
        return self.build(a * 2, b * 3)


def mapping(a: Tensor, b: Tensor) -> Any:
    return OrderedDict(first=a, second=[b, None, 4])


def model_output(a: Tensor, b: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput  # takes a second

    return BaseModelOutput(last_hidden_state=a, hidden_states=(b, a + b))


NESTS = [
    (lambda a, b: (a, b), "output.1", lambda nest: nest[1], lambda nest: nest[0]),
    (lambda a, b: [a, {"x": b}], "output.1.x", lambda nest: nest[1]["x"], lambda nest: nest[0]),
    (Pair, "output.right", lambda nest: nest.right, lambda nest: nest.left),
    (mapping, "output.second.0", lambda nest: nest["second"][0], lambda nest: nest["first"]),
    (lambda a, b: Result(a, (b, a), "x"), "output.hidden.0", lambda nest: nest.hidden[0], lambda nest: nest.logits),
    (model_output, "output.hidden_states.0", lambda nest: nest.hidden_states[0], lambda nest: nest.last_hidden_state),
]


@pytest.mark.parametrize(("build", "slot", "pick", "other"), NESTS)
def test_nests(build: Any, slot: str, pick: Any, other: Any) -> None:
    module = Returns(build)
    a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    with rewrite(module, {f"self:{slot}": add_one, f"self:{slot}.grad": halve}):
        nest = module(a, b)
        pick(nest).sum().backward(retain_graph=True)
        assert type(nest) is type(build(a, b))
        assert torch.equal(pick(nest), b * 3 + 1)
        assert a.grad is None or torch.equal(a.grad, torch.zeros(3))
        assert b.grad is not None
        assert torch.equal(b.grad, torch.full((3,), 1.5))
        other(nest).sum().backward()
    assert torch.equal(a.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]


@pytest.mark.parametrize(("build", "slot", "pick", "other"), NESTS)
def test_what_is_unchanged_in_a_nest_stays_the_same_object(build: Any, slot: str, pick: Any, other: Any) -> None:
    made: list[Any] = []

    def keep(a: Tensor, b: Tensor) -> Any:
        made.append(build(a, b))
        return made[-1]

    module = Returns(keep)
    a, b = torch.randn(3), torch.randn(3)
    with rewrite(module, {f"self:{slot}": leave}):
        assert module(a, b) is made[0]
    with rewrite(module, {f"self:{slot}": add_one}):
        nest = module(a, b)
    assert nest is not made[1]
    assert torch.equal(pick(made[1]), b * 3)  # what the module itself may have kept is as it was
    assert other(nest) is other(made[1])


def test_the_same_tensor_twice_in_a_nest() -> None:
    """Both places have rules; the gradient of one tensor is one, so both act on it, in order."""
    module = Returns(lambda a, b: (a, a))
    a, b = torch.ones(2, requires_grad=True), torch.ones(2)
    with rewrite(module, {"self:output.0.grad": halve, "self:output.1.grad": lambda g, state: g + 1}):
        first, second = module(a, b)
        (first + second).sum().backward()
    # plain: 2 arrives; of two tensors in one: later hooks come first
    assert a.grad is not None
    assert a.grad.unique().tolist() in ([((2 + 1) * 0.5) * 2], [(2 * 0.5 + 1) * 2])


@pytest.mark.parametrize("make", [nn.Identity, lambda: nn.Dropout(0.0).eval(), nn.Sequential])
def test_a_module_that_returns_its_input(make: Any) -> None:
    """What else is done with the input keeps its gradient."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.through = make()

        def forward(self, x: Tensor) -> Tensor:
            h = x * 1.0
            return self.through(h) * 3 + h * 5

    net, x = Net(), torch.ones(2, requires_grad=True)
    with rewrite(net, {"through:output.grad": lambda gradient, state: gradient * 100}):
        net(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [305.0, 305.0]


@pytest.mark.parametrize("pack", [lambda h: ((h, h * 1),), lambda h: ([h],), lambda h: ({0: h, 1: h},)])
def test_a_module_that_returns_what_its_argument_holds(pack: Any) -> None:
    class First(nn.Module):
        def forward(self, several: Any) -> Tensor:
            return several[0]

    x = torch.ones(2, requires_grad=True)
    with rewrite(net := First(), {"self:output.grad": lambda gradient, state: gradient * 100}):
        h = x * 1.0
        (net(*pack(h)) * 3 + h * 5).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [305.0, 305.0]


def test_in_place_behind_a_module_that_hands_its_argument_on_is_refused() -> None:
    """There the rules have a node of their own, which a write takes out of the way."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Identity(), nn.ReLU(inplace=True))
    with rewrite(net, {"1:output.grad": halve}):
        out = net(torch.randn(2, 3))
        with pytest.raises(CannotRewriteError, match="1:output"):
            out.sum().backward()


def test_a_module_that_returns_its_parameter() -> None:
    class Prompt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self) -> Tensor:
            return self.weight

    net = Prompt()
    with rewrite(net, {"self:output.grad": halve}):
        for _ in range(2):
            net().sum().backward()
        net.weight.sum().backward()  # not through the module
    assert net.weight.grad is not None
    assert net.weight.grad.tolist() == [2.0] * 3


def test_relu_in_place_behind_a_site() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)), torch.randn(5, 3)
    with rewrite(net, {"0:output.grad": halve, "1:output.grad": lambda g, state: g + 1}):
        net(x).sum().backward()
    found = gradients(net)
    net.zero_grad()
    h = net[0](x)
    h.register_hook(lambda gradient: gradient * 0.5)
    r = torch.relu(h)
    r.register_hook(lambda gradient: gradient + 1)
    net[2](r).sum().backward()
    assert_same(found, gradients(net))


class ViewThenWrite(nn.Module):
    def __init__(self, *, writes_base: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.flat = nn.Flatten(0)
        self.writes_base = writes_base

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        flat = self.flat(h)
        (h if self.writes_base else flat).mul_(2)
        return flat.sin()


@pytest.mark.parametrize("writes_base", [False, True])
def test_a_view_that_is_written_into_is_refused(writes_base: bool) -> None:
    net = ViewThenWrite(writes_base=writes_base)
    with rewrite(net, {"flat:output.grad": halve}):
        out = net(torch.randn(2, 3))
        with pytest.raises(CannotRewriteError, match="flat:output"):
            out.sum().backward()
        with rewrite(net, {"linear:output.grad": halve}):
            pass


def test_a_write_behind_a_pass_within_the_forward_is_noticed() -> None:
    class Forces(ViewThenWrite):
        def forward(self, x: Tensor) -> Tensor:
            flat = self.flat(self.linear(x))
            (force,) = torch.autograd.grad(flat.sum(), self.linear.weight, retain_graph=True)
            return flat.mul_(2) * force.sum()

    net = Forces()
    with rewrite(net, {"flat:output.grad": halve}):
        out = net(torch.randn(2, 3))
        with pytest.raises(CannotRewriteError, match="flat:output"):
            out.sum().backward()


def test_a_write_behind_the_backward_pass_is_harmless() -> None:
    net, x = nn.Flatten(0), torch.ones(2, 2, requires_grad=True)
    with rewrite(net, {"self:output.grad": halve}):
        first, second = net(x * 1.0), net(x * 1.0)
        first.sum().backward()
        with torch.no_grad():
            first.zero_()
        second.sum().backward()
    assert x.grad is not None
    assert x.grad.unique().tolist() == [1.0]


def test_a_base_that_is_written_through_its_view_has_its_gradient() -> None:
    net, x = ViewThenWrite(), torch.randn(2, 3)
    with rewrite(net, {"linear:output.grad": halve}):
        net(x).sum().backward()
    found = gradients(net)
    net.zero_grad()
    h = net.linear(x)
    h.register_hook(lambda gradient: gradient * 0.5)
    (h.flatten() * 2).sin().sum().backward()
    assert_same(found, gradients(net))


class Splits(nn.Module):
    def __init__(self, split: Any) -> None:
        super().__init__()
        self.split = split

    def forward(self, x: Tensor) -> Any:
        return self.split(x * 1.0)


@pytest.mark.parametrize("split", [lambda h: h.chunk(2), lambda h: h.unbind(0)[:2], lambda h: torch.var_mean(h, 0)])
def test_nodes_with_several_outputs(split: Any) -> None:
    """One output has no gradient at all: its rules are not asked, and the other's are."""
    module, seen = Splits(split), []

    def note(gradient: Tensor, state: SiteState) -> Tensor:
        seen.append(state.site)
        return gradient * 3

    x = torch.randn(4, 3, requires_grad=True)
    with rewrite(module, {"self:output.*.grad": note}):
        module(x)[1].sum().backward()
    found, x.grad = x.grad, None
    (split(x * 1.0)[1].sum() * 3).backward()
    assert seen == ["self:output.1.grad"]
    torch.testing.assert_close(found, x.grad, rtol=0, atol=0)


def test_integers_and_no_grad() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.argmax(-1), x * 2

    net, x = Net(), torch.randn(2, 3)
    with rewrite(net, {"self:output.*": add_one, "self:output.*.grad": halve}), torch.no_grad():
        index, value = net(x)
    assert torch.equal(index, x.argmax(-1) + 1)
    assert torch.equal(value, x * 2 + 1)


def test_complex_and_zero_dimensional_outputs() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.fft(x)

    net, x = Net(), torch.randn(4, requires_grad=True)
    with rewrite(net, {"self:output.grad": lambda g, state: g * 1j}):
        net(x).abs().sum().backward()
    found, x.grad = x.grad, None
    h = torch.fft.fft(x)
    h.register_hook(lambda gradient: gradient * 1j)
    h.abs().sum().backward()
    assert torch.equal(found, x.grad)  # type: ignore[arg-type]


def test_a_rule_that_only_looks_at_a_value_leaves_the_other_uses_of_an_argument_alone() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.same(x).sum() + 10 * x.sum()

    def nothing(gradient: Tensor, state: Any) -> Tensor:
        return torch.zeros_like(gradient)

    x = torch.ones(3, requires_grad=True)
    with rewrite(net := Net(), {"same:output": lambda value, state: None, "same:output.grad": nothing}):
        net(x * 1).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [10.0, 10.0, 10.0]
